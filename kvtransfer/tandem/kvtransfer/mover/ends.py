"""D's view of the other end of each link: compatibility, and the form of its KV."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from tandem.kvtransfer.control.peers import MAX_REMEMBERED
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy
from tandem.kvtransfer.mover.cards import form_with, why_refused
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.protocol.ids import Incarnation


class Ends:
    """Forms of links, for the transfer thread; ``block_size`` is for any thread."""

    def __init__(self, parts: MoverParts, policy: ConsumerPolicy) -> None:
        self._parts = parts
        self._policy = policy
        self._forms: dict[Incarnation, Form | None] = {}
        self._block_sizes: dict[Incarnation, int] = {}
        self._uncut: dict[Incarnation, str] = {}

    def why_refused(self, card: ProducerCard) -> str | None:
        """Return why there is no link to this end, or None."""
        return why_refused(card, self._parts)

    def why_uncut(self, peer: Incarnation, card: ProducerCard) -> str | None:
        """Record the link's form and return None, or return why the card's transport cannot
        bring KV."""
        form = form_with(card, self._parts, self._policy)
        if isinstance(form, str):
            self._uncut[peer] = f"not by {card.connector}: {form}"
            return self._uncut[peer]
        self._forms[peer] = form
        self._block_sizes[peer] = card.block_size
        return None

    def fell_for(self, peer: Incarnation) -> str:
        """Return why a better transport cannot copy the peer's blocks; empty if none was tried."""
        return self._uncut.get(peer, "")

    def form(self, peer: Incarnation) -> Form | None:
        """Return the form of the parts or copies of a link."""
        return self._forms[peer]

    def block_size(self, peer: Incarnation) -> int | None:
        """Return the tokens of a block of the peer's; None if it was never linked."""
        return self._block_sizes.get(peer)

    def forget(self, peer: Incarnation) -> None:
        """Forget a lost link; the block sizes of peers that are gone longest are dropped."""
        self._forms.pop(peer, None)
        _shorten(self._block_sizes, self._forms)
        _shorten(self._uncut, self._forms)


def _shorten(known: dict[Incarnation, Any], linked: Container[Incarnation]) -> None:
    gone = [each for each in known if each not in linked]
    for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
        del known[each]
