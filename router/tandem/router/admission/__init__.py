"""Limits of the requests that may be under way at once, and of the time that one may wait."""
