"""What can go wrong inside kvtransfer and is told by raising.

    TandemError
    └── KVTransferError
        ├── TransportError      a transport cannot start, register or connect
        │   └── NoAgentYet      the node has no agent now, which may come
        └── AddressInUse        no free port among those allowed

A failed hand-off is not an exception: it is an event (``events.LoadFailed``), and bytes that are
not a message raise ``tandem.protocol.errors.WireError``, which the receiver counts.
"""

from tandem.protocol.errors import TandemError


class KVTransferError(TandemError):
    """Anything that kvtransfer raises on purpose."""


class TransportError(KVTransferError):
    """A transport cannot be used; the text says which and why."""


class NoAgentYet(TransportError):
    """No agent of the node listens; what needs it may be tried again later."""


class AddressInUse(KVTransferError):
    """No port of those allowed could be bound."""
