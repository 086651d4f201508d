"""Links to workers: which are up, their models, their load."""
