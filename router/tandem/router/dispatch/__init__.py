"""Requests over many workers: attempts, emitted tokens, retries."""
