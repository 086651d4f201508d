"""Cached prefixes between peers: pulling them, lending them, and both as parts of a role.

The hand-off's own machines and threads do it; see docs/decisions/035.
"""
