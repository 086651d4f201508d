"""Stand-ins for the classes that ask pods: a rehearsal asks none, and uses the status.

A laptop reaches the API server, seldom the pods. The last values of the status stand for the pods'
answers; a revision without a canary yet is unknown.
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
    """Do nothing: no look is to be woken."""


class ToldProbes(Probes):
    """Canaries and links as the status has them."""

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
        """Return the values of the status."""
        return self._told

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        """Send no request."""
        return None


class ToldKeys(KeyWatch):
    """Stand-in for reads of keys: no pod has read keys that the status does not list."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, _nobody)

    def all_read(
        self, key: Key, pods: Iterable[PodView], wanted: frozenset[str], door: Door
    ) -> bool:
        """Return whether there are no pods; none is asked."""
        return not list(pods)


class NoRefusals(Refusals):
    """Stand-in that asks no router for its refusals."""

    def __init__(self) -> None:
        super().__init__(_nobody)

    def known(self, key: Key, pods: Iterable[PodView], token: str) -> dict[str, Problem]:
        """Return nothing."""
        return {}


class NoReach(Reach):
    """Stand-in that asks no address."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, _nobody, OperatorMetrics(), 0.0)

    def look(self, owner: Identity, pods: Iterable[PodView]) -> None:
        """Do nothing."""
