"""Cached prefixes between peers: who pulls one, who lends one, and what joins both to a role.

The hand-off's own machines and threads do it; see docs/decisions/035.
"""
