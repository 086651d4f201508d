"""Endpoints of operators and tools: health, metrics, sleep, debugging, documents."""
