"""Exceptions of kvtransfer.

A failed hand-off is an event (``events.LoadFailed``). Bytes that are not a message raise
``tandem.protocol.errors.WireError``, which the receiver counts.
"""

from tandem.protocol.errors import TandemError


class TransportError(TandemError):
    """A transport cannot be used; the text names it and the reason."""


class NotThereYet(TransportError):
    """A requirement of the transport is missing; a later try may work."""


class NoAgentYet(NotThereYet):
    """No agent of the node listens."""


class NoSocketYet(NotThereYet):
    """A worker cannot be called in the folder that names its machine."""


class AddressInUse(TandemError):
    """None of the allowed ports could be bound."""
