"""Movers of extents behind one protocol: from send slots into receive slots, or from P's blocks
right into D's.

tcp, nixl and memory land in slots; memory_blocks writes blocks, as a ``cuda_p2p`` for GPUs of one
host would.
"""
