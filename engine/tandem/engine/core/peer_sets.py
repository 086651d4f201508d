"""Which prefill workers there are, when several routers each say what they know."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.protocol.ids import Incarnation


class PeerSets:
    """The last word of each router; what counts is all of them together."""

    def __init__(self) -> None:
        self._by_router: dict[Incarnation, Mapping[str, Incarnation]] = {}

    def add(
        self, router: Incarnation, controls: Mapping[str, Incarnation]
    ) -> dict[str, Incarnation]:
        """A router's set replaces its last one; returns the union."""
        self._by_router[router] = controls
        union: dict[str, Incarnation] = {}
        for each in self._by_router.values():
            union.update(each)
        return union

    def forget(self, router: Incarnation) -> None:
        """A router is gone. Links are kept until another router speaks: the same router, back
        after a lost frame, would want them again."""
        self._by_router.pop(router, None)
