"""The prefill worker: a connector, its policy and an entry.

Thin on purpose: kernels are in kernels/, the scheduler and the runner in engine/, peers and bytes
in kvtransfer/. Here engine's ``KVConnector`` is married to kvtransfer's ``HandoffProducer``.
"""
