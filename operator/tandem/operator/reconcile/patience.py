"""Time of a service's next look without an event from a watch. Called by ``reconciler``."""

from __future__ import annotations

from tandem.operator.decide.keyring import KeyPlan
from tandem.operator.decide.rollout import Phase
from tandem.operator.decide.status import Picture

SOON = 5.0
"""Seconds to the next look while a change is under way that no watch reports."""


def next_look(picture: Picture, keys: KeyPlan, wait: float | None) -> float | None:
    """Return the seconds until a change is possible that no watch reports."""
    waits = [wait] if wait is not None else []
    if keys.waits > 0:  # pods are asked for them from the next look on, and no event brings that
        waits.append(min(keys.waits, SOON))
    quiet = picture.decision.phase in (Phase.STABLE, Phase.SUSPENDED, Phase.PAUSED)
    asleep = picture.decision.phase is Phase.SUSPENDED
    if (
        not quiet
        or picture.accepted[0] != "True"  # names get free, quotas and references come
        or not (picture.model.ready or asleep)
        or any(not pod.ready for pod in picture.pods)
    ):
        waits.append(SOON)
    return min(waits, default=None)
