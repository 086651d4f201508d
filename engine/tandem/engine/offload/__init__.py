"""A tier of host memory for evicted KV blocks: the hashes it holds, and the copies in both
directions.

No torch: the memory itself, and the copies, are a rank's (``engine/worker/offload``).
"""
