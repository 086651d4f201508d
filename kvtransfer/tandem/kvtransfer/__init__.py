"""KV hand-off between workers: leases, their deadlines, and the transfer of bytes.

``service`` has the two public classes, ``HandoffProducer`` and ``HandoffConsumer``. ``handoff`` has
the state machines (pure), ``control`` and ``mover`` the threads for messages and bytes,
``transports`` the ways to move them.
"""
