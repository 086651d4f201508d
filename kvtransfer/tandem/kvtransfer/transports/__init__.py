"""Movers of extents behind one protocol: from send slots into receive slots, or from P's blocks
right into D's.

tcp and nixl land in slots; cuda_p2p and shm write blocks.
"""
