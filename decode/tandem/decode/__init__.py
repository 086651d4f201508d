"""The decode worker: a connector, its policy and an entry.

Thin on purpose: kernels are in kernels/, the scheduler, the block manager and the sampler loop in
engine/, peers and bytes in kvtransfer/. Here engine's ``KVConnector`` is married to kvtransfer's
``HandoffConsumer``. A request that names no producer is computed here whole, so that this is the
aggregated worker too.
"""
