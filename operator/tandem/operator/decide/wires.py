"""Which roles roll because others do: pods of two wires have no links to each other. Pure.

An upgrade of the operator rolls nothing. The first change after it gives a role pods of this
release's images. If these speak another wire than the pods of the other roles, those roles roll
with it, so that a router finds both halves of a pair. Called by ``plan``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import WORKERS, Manifest, Role
from tandem.operator.desired.workload import RevisionKey
from tandem.protocol.card import WIRE
from tandem.protocol.names import ANNOTATION_WIRE


def moved_roles(facts: Facts, templates: Mapping[RevisionKey, Manifest]) -> frozenset[Role]:
    """Return the roles that roll only because another one does.

    A role whose stored template is of another wire would stay as it is. None moves while all stay:
    a spec that is taken back has its old revisions again.
    """
    alone = msgspec.structs.replace(facts, moved=frozenset())
    moved = msgspec.structs.replace(facts, moved=frozenset(Role))
    stays, rolls, has_rolled = set(), set(), set()
    for role in Role:
        template = templates.get((role, alone.revision(role)))
        if template is not None and wire_of(template) != WIRE:
            stays.add(role)
        elif template is None and (role, moved.revision(role)) in templates:
            has_rolled.add(role)
        else:
            rolls.add(role)
    if not rolls and not has_rolled:
        return frozenset()
    return frozenset(has_rolled | {role for role in stays if not _is_pinned(facts, role)})


def _is_pinned(facts: Facts, role: Role) -> bool:
    """Return whether a role's image is the user's: new pods then speak the same version."""
    return role in WORKERS and facts.spec.image is not None


def wire_of(template: Manifest) -> str | None:
    """Return the wire that pods of a template speak, None where an earlier release made it."""
    annotations = template.get("metadata", {}).get("annotations") or {}
    found: str | None = annotations.get(ANNOTATION_WIRE)
    return found
