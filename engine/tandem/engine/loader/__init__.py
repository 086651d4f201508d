"""Prepared folder → tensors of one rank: safetensors, mapped into memory, or seeded dummies.

Public: ``open_weights(config) -> Weights``; a model calls ``weights.get(name, shape=, shard=)`` for
every tensor that it needs, merges what it merges, and ends with ``weights.check_all_used()``.
``Shard(rank, size, dim)`` asks for one rank's slice, read without the rest. Errors are of the tree
of ``LoadError`` and name the tensor and the file. Called by tandem.engine.worker and models.
"""
