"""Measured and predicted times of steps."""
