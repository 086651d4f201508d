"""Transports of extents behind one protocol: from send slots into receive slots, or from P's
blocks directly into D's.

tcp and nixl write slots; cuda_p2p and shm write blocks.
"""
