"""Transports of extents: from send slots into receive slots (tcp, nixl), or from P's blocks
directly into D's (cuda_p2p, shm)."""
