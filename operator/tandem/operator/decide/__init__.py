"""Decisions from the objects that were read. All are pure."""
