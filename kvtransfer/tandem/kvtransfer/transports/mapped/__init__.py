"""KV between workers of one machine: D maps P's memory and copies blocks into its own.

``cuda_p2p`` does it between GPUs, ``shm`` between workers on a CPU. P sends descriptors of KV
cache, slots and tags over a Unix socket (``giving``) to a caller that proves the secret of its
card, which came over the authenticated control link. D (``taking``) maps them to be read, once for
each incarnation, and runs the copies itself (``copiers``), so that it sees the end of each.
"""
