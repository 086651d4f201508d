"""gRPC next to HTTP: the same requests through the same checks, queue and fleet.

``make proto`` makes ``tandem_pb2`` from ``tandem.proto``.
"""
