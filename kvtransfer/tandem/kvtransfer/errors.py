"""Exceptions of kvtransfer.

    TandemError
    └── KVTransferError
        ├── TransportError      a transport cannot start, register or connect
        │   └── NotThereYet     a requirement is missing and may appear later
        │       ├── NoAgentYet  the node has no agent now
        │       └── NoSocketYet a worker of this machine cannot be called now
        └── AddressInUse        no free port among those allowed

A failed hand-off is not an exception: it is an event (``events.LoadFailed``), and bytes that are
not a message raise ``tandem.protocol.errors.WireError``, which the receiver counts.
"""

from tandem.protocol.errors import TandemError


class KVTransferError(TandemError):
    """Anything that kvtransfer raises on purpose."""


class TransportError(KVTransferError):
    """A transport cannot be used; the text names it and the reason."""


class NotThereYet(TransportError):
    """A requirement of the transport is missing; a later try may work."""


class NoAgentYet(NotThereYet):
    """No agent of the node listens."""


class NoSocketYet(NotThereYet):
    """A worker that meets its peers in this very folder cannot be called there."""


class AddressInUse(KVTransferError):
    """No port of those allowed could be bound."""
