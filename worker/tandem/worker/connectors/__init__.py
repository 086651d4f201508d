"""Cached prefixes between peers: pulling them, lending them, and both as parts of a role.

The hand-off's state machines and threads do it. See docs/decisions/prefix-fetch.md.
"""
