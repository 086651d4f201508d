"""gRPC beside HTTP: the same requests through the same checks, queue and fleet.

``tandem.proto`` is what clients see; ``make proto`` makes ``tandem_pb2`` of it. ``server`` listens,
``inference`` answers, ``reading`` turns messages into the bodies that HTTP has, ``writing`` outputs
into messages, and ``errors`` what went wrong into gRPC's statuses.
"""
