"""Stand-ins for those who ask pods: a rehearsal asks nobody, and goes by what the status says.

A laptop reaches the API server, seldom the pods. What only they could say is taken to be as it was
told last; of a revision that no canary has met yet nothing is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set

from tandem.operator.api.conditions import ConditionType, Reason
from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.cluster import Cluster
from tandem.operator.decide.observe import PodView, Problem
from tandem.operator.decide.rollout import token_name
from tandem.operator.decide.verdict import Verdict
from tandem.operator.desired.naming import Identity
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.probes.canary import Question
from tandem.operator.probes.keywatch import Door, KeyWatch
from tandem.operator.probes.probing import Asked, Key, Known, Probes
from tandem.operator.probes.reach import Reach
from tandem.operator.probes.refusals import Refusals


def _nobody(_key: Key) -> None:
    """No look is to be woken."""


class ToldProbes(Probes):
    """Canaries and links as a status told them."""

    def __init__(self, status: LLMServiceStatus) -> None:
        super().__init__(0.0, _nobody)
        self._told = Known(links=status.links)
        name = status.rollout.servable or token_name(status.rollout)
        for each in status.conditions:
            told = each.status != "Unknown" and each.reason != Reason.SUSPENDED
            if each.type == ConditionType.SERVABLE and told:
                verdict = Verdict(
                    ok=each.status == "True",
                    reason=Reason(each.reason),
                    message=each.message or "",
                    targets=name,
                    at=time.time(),
                )
                self._told.asked[name] = Asked(verdict=verdict)

    def known(self, key: Key) -> Known:
        """What the status said."""
        return self._told

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        """Ask nobody."""
        return None


class ToldKeys(KeyWatch):
    """Nobody has read keys that the status does not say were read."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, _nobody)

    def all_read(
        self, key: Key, pods: Iterable[PodView], wanted: frozenset[str], door: Door
    ) -> bool:
        """No pod is asked."""
        return not list(pods)


class NoRefusals(Refusals):
    """No router is asked whose keys do not fit."""

    def __init__(self) -> None:
        super().__init__(_nobody)

    def known(self, key: Key, pods: Iterable[PodView], token: str) -> dict[str, Problem]:
        """Nothing is known."""
        return {}


class NoReach(Reach):
    """No address is asked."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, _nobody, OperatorMetrics(), 0.0)

    def look(self, owner: Identity, pods: Iterable[PodView]) -> None:
        """Nobody is looked at."""
