"""A tier of host memory behind the KV blocks: which block is there, and what goes there and back.

No torch: the memory itself, and the copies, are a rank's (``engine/worker/offload``).
"""
