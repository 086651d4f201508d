"""Pieces of (sequence, head) pairs: sums that are left, merged or written."""
