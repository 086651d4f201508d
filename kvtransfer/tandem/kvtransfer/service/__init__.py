"""The classes that prefill/ and decode/ use; see kvtransfer/README.md for the contract.

``producer.HandoffProducer`` and ``consumer.HandoffConsumer``: every method is for the engine's
thread and returns at once. Each has a control and a transfer thread.
"""
