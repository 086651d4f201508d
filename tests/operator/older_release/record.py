"""Prints what the release before makes of ``specs``, as JSON. Run with its packages in PYTHONPATH:
it imports nothing of this release but the two modules of tests that it names."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
from tests.operator.builders import spec
from tests.operator.older_release.specs import SPECS

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired import secrets
from tandem.operator.desired.compose import base, desired, target_revisions
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import Identity, Role
from tandem.operator.settings import OperatorSettings


def facts(changes: dict[str, Any], **more: Any) -> Facts:
    """Facts of the demo with changes."""
    settings = OperatorSettings(
        own_namespace="system", router_image="router:older", worker_image="worker:older"
    )
    publics = {f"{role}.1": role[0] * 40 for role in Role}
    return Facts(
        owner=Identity("ns", "demo", "uid"),
        spec=msgspec.convert(spec(**changes), LLMServiceSpec),
        settings=settings,
        publics=publics,
        **more,
    )


def revisions() -> list[dict[str, Any]]:
    """Revisions of every spec, with and without what a source was resolved to, and of new keys."""
    found = []
    for name, changes in SPECS.items():
        for pinned, generation in ((None, 1), ("c0ffee", 1), (None, 2)):
            made = facts(changes, pinned=pinned, key_generation=generation)
            targets = {str(role): each for role, each in target_revisions(made).items()}
            keys = {"name": name, "pinned": pinned, "generation": generation}
            found.append({**keys, "revisions": targets})
    return found


def children() -> list[dict[str, Any]]:
    """All children of the demo with one replica a role, as the operator wrote them."""
    made = facts({})
    counts = {(role, made.revision(role)): 2 if role is Role.ROUTER else 1 for role in Role}
    objects = desired(made, counts, {})
    keys = [secrets.keys(made, role, role[0] * 40, "s" * 40) for role in Role]
    others = [each for each in objects.created if each["kind"] != "Job"]
    job = model_job(made)
    assert job is not None, "the demo's model is read by a Job"
    token = secrets.canary_token(made, "older-token")
    return [*base(made), *objects.applied[len(base(made)) :], *others, job, *keys, token]


if __name__ == "__main__":
    json.dump(
        {"revisions": revisions(), "children": children()}, sys.stdout, indent=1, sort_keys=True
    )
