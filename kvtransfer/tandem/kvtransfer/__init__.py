"""KV hand-off between workers: permission to read KV, its deadlines, and the transfer of bytes.

Two classes of ``tandem.kvtransfer.service`` are public: ``HandoffProducer`` (a worker that
exports KV) and ``HandoffConsumer`` (a worker that takes it). prefill/ and decode/ connect them
to the engine's ``KVConnector``; kvtransfer has bytes, peers and leases, no model and no
scheduler. ``handoff`` holds the machines (pure: no torch, sockets or clock), ``control`` the
thread that talks to peers, ``mover`` the thread that moves bytes, ``transports`` the ways to
move them. Import from the modules.
"""
