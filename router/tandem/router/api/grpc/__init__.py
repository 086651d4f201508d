"""gRPC next to HTTP: the same requests through the same checks, queue and fleet.

``make proto`` makes ``tandem_pb2`` from ``tandem.proto``. ``server`` listens, ``call`` is one call,
``inference`` has the methods. ``reading`` makes the bodies that HTTP has, once ``values`` has
counted a message; ``writing`` makes messages, and ``errors`` the statuses.
"""
