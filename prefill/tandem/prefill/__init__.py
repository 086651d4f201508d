"""Prefill worker: the engine with kvtransfer's ``HandoffProducer`` as its ``KVConnector``."""
