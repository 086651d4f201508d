"""Executors, which send a step's plan to the ranks."""
