"""Decode worker: the engine with kvtransfer's ``HandoffConsumer`` as its ``KVConnector``.

Requests without a producer are computed whole, so this is the aggregated worker, too.
"""
