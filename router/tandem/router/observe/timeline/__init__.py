"""Timelines of calls: kept for a while, divided into parts, and shown."""
