"""KV between workers of one machine: D maps P's memory and copies blocks into its own.

P sends descriptors over a Unix socket (``giving``) to a caller that proves the secret of its card.
D (``taking``) maps them for reading, once an incarnation, and runs the copies itself (``copiers``),
so that it sees the end of each.
"""
