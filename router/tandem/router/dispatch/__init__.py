"""Requests over many workers: attempts, the log of emitted tokens, the failure retry policy."""
