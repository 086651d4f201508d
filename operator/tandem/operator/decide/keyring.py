"""CURVE keys of a service: generations, loss, rotation.

A rotation makes keys of every role, publishes the public ones, waits until pods have read them,
rolls the pods, and drops the old keys. A lost Secret starts a rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

from tandem.operator.api.status import Keys
from tandem.operator.clock import parse_time, time_text
from tandem.operator.desired.naming import Role

Held = Mapping[tuple[Role, int], str]
"""Public keys of existing Secrets, by role and generation."""


class KeyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Planned changes to keys."""

    generation: int
    """Newest generation, whose Secrets must exist."""
    active: int
    """Generation that new pods mount."""
    missing: list[Role]
    """Roles without a Secret of ``generation``."""
    retired: list[int]
    """Generations without any use: drop their keys and Secrets."""
    waits: float
    """Seconds until ``generation`` may become active."""
    status: Keys

    def held_back(self, before: Keys) -> KeyPlan:
        """Return the plan without ``generation``, which could not be made: the next pass tries
        again.
        """
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
    """Return the plan for the Secrets in ``held``.

    ``in_use`` are generations that pods mount, ``needed`` those that pods may mount again.
    ``publish_seconds``: maximum time for a ConfigMap to reach pods. ``all_read``: running pods have
    reported ``status.generation``.
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
    """Return the public keys that pods get.

    They are those of existing Secrets, and of lost ones while running pods use them.
    """
    lost = {pair: key for pair, key in published.items() if pair[1] in in_use}
    return {pair: key for pair, key in {**lost, **held}.items() if pair[1] not in retired}


def _generation(held: Held, status: Keys, rotation_id: str | None, in_use: Sequence[int]) -> int:
    newest = max([status.generation, *(number for _, number in held)], default=0)
    if newest == 0:
        return 1
    if status.generation == 0:  # incomplete and unused, or the status was lost
        return newest if _complete(held, newest) or newest not in in_use else newest + 1
    if rotation_id != status.rotation_id:
        return status.generation + 1
    if newest > status.generation or not _complete(held, newest):
        # Secrets made just before a failed status write are used.
        return newest if newest > status.generation else newest + 1
    return newest


def _complete(held: Held, generation: int) -> bool:
    return all((role, generation) in held for role in Role)


def _published(status: Keys, generation: int, now: float) -> float:
    if status.generation == generation and status.published_at is not None:
        return parse_time(status.published_at)
    return now
