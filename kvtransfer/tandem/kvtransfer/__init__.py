"""KV hand-off between workers: who may read what, until when, and the moving of bytes.

Two classes are for others, both in ``tandem.kvtransfer.service``: ``HandoffProducer`` (a worker
that exports KV) and ``HandoffConsumer`` (a worker that takes it). prefill/ and decode/ marry them
to the engine's ``KVConnector``; kvtransfer knows bytes, peers and leases, no model and no
scheduler. ``handoff`` holds the machines (pure: no torch, sockets or clock), ``control`` the
thread that talks to peers, ``mover`` the thread that moves bytes, ``transports`` the ways to move
them. Import from the modules.
"""
