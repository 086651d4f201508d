"""Movers of bytes between a send slot of P and a receive slot of D, behind one protocol.

``cuda_p2p``, for GPUs of one host, takes its place here beside tcp, nixl and memory.
"""
