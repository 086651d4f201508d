"""Timelines of calls: kept for a while, cut into parts, and shown."""
