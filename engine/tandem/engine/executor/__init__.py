"""Carries a step's plan to the ranks that run it."""
