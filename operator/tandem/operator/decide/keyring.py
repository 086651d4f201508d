"""CURVE keys that a service has and requires: generations, loss, rotation. Pure.

A rotation goes: make the next generation of every role, publish its public keys next to the old
ones, wait until running pods have read them, roll the pods, drop the old keys. A lost Secret starts
a rotation, since its key is stored only there. Called by ``reconcile``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

from tandem.operator.api.status import Keys
from tandem.operator.clock import parse_time, time_text
from tandem.operator.desired.naming import Role

Held = Mapping[tuple[Role, int], str]
"""Public keys of the Secrets that exist, by role and generation."""


class KeyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of the changes to keys."""

    generation: int
    """Newest generation; its Secrets shall exist."""
    active: int
    """Generation that new pods mount."""
    missing: list[Role]
    """Roles whose Secret of ``generation`` must be made."""
    retired: list[int]
    """Generations that no pod uses now or later: drop their keys and Secrets."""
    waits: float
    """Seconds until ``generation`` may become active; 0 when it is."""
    status: Keys

    def held_back(self, before: Keys) -> KeyPlan:
        """Return the plan if ``generation`` could not be made whole: the status stays as it was, so
        that the next look tries the same generation again instead of a further one."""
        return msgspec.structs.replace(self, status=before)


def plan_keys(
    held: Held,
    status: Keys,
    *,
    rotation_id: str | None,
    in_use: Sequence[int],
    now: float,
    publish_seconds: float,
    all_read: bool = False,
    needed: Set[int] = frozenset(),
) -> KeyPlan:
    """Return the plan for the Secrets in ``held``; ``in_use`` are generations that pods mount.

    ``needed`` are those that pods may mount again: they stay, without a wait for their readers.

    ``publish_seconds`` is the longest time for a changed ConfigMap to reach every pod; ``all_read``
    states that all running pods have reported the keys of ``status.generation``.
    """
    generation = _generation(held, status, rotation_id, in_use)
    missing = [role for role in Role if (role, generation) not in held]
    older = {number for _, number in held if number < generation} | {
        number for number in in_use if number < generation
    }
    published = _published(status, generation, now)
    waits = 0.0
    read = status.generation if all_read else status.read
    if older and in_use and read < generation:
        waits = max(0.0, published + publish_seconds - now)
    active = generation if waits == 0 or not older else max(older)
    retired = sorted(older - set(in_use) - needed) if active == generation else []
    keys = Keys(
        generation=generation,
        rotating=bool(older - set(retired)),
        rotation_id=rotation_id,
        read=generation if waits == 0 else status.read,
        published_at=time_text(published),
    )
    return KeyPlan(
        generation=generation,
        active=active,
        missing=missing,
        retired=retired,
        waits=waits,
        status=keys,
    )


def may_speak(
    held: Held, published: Held, *, in_use: Sequence[int], retired: Sequence[int]
) -> dict[tuple[Role, int], str]:
    """Return the public keys that pods get: of the Secrets in ``held``, and of a lost one for as
    long as running pods have it. Otherwise new pods could not reach those before they are
    replaced."""
    lost = {pair: key for pair, key in published.items() if pair[1] in in_use}
    return {pair: key for pair, key in {**lost, **held}.items() if pair[1] not in retired}


def _generation(held: Held, status: Keys, rotation_id: str | None, in_use: Sequence[int]) -> int:
    newest = max([status.generation, *(number for _, number in held)], default=0)
    if newest == 0:
        return 1
    if status.generation == 0:  # half made and used by nobody yet; or the status was lost
        return newest if _complete(held, newest) or newest not in in_use else newest + 1
    if rotation_id != status.rotation_id:
        return status.generation + 1
    if newest > status.generation or not _complete(held, newest):
        # Secrets made just before the status could be written are taken up, whole or completed.
        return newest if newest > status.generation else newest + 1
    return newest


def _complete(held: Held, generation: int) -> bool:
    return all((role, generation) in held for role in Role)


def _published(status: Keys, generation: int, now: float) -> float:
    if status.generation == generation and status.published_at is not None:
        return parse_time(status.published_at)
    return now
