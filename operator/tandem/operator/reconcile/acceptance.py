"""The Accepted condition of a service, checked with the API server."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import msgspec
from kubernetes.utils.quantity import parse_quantity

from tandem.operator.api.service import Surge
from tandem.operator.api.status import Reason
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier, Problem, Taken
from tandem.operator.cluster.client import Refused, unanswered
from tandem.operator.decide import plan
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import can_spare
from tandem.operator.decide.scaling import gives_back, is_full
from tandem.operator.decide.words import Word
from tandem.operator.desired.compose import base, desired, target_revisions
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.policy import answering_role
from tandem.operator.desired.references import (
    ALLOWED,
    LABEL_ALLOWED,
    foreign_secrets,
    is_allowed,
    named_secrets,
)
from tandem.operator.desired.workload import deployment, rendered

_AMOUNTS = ("requests", "limits")
Asked = dict[str, Decimal]
"""Amounts by ``requests.NAME`` and ``limits.NAME``."""


def fits(pod: Manifest, old: Manifest) -> bool:
    """Return whether a pod requests no more than one of the spec ``old``. Raises ValueError."""
    there = resources_of(old)
    return all(amount <= there.get(name, 0) for name, amount in resources_of(pod).items())


def resources_of(pod: Manifest) -> Asked:
    """Return the amounts of a pod for a quota. Raises ValueError."""
    inits = pod.get("initContainers") or ()
    running = [*pod["containers"], *(each for each in inits if _stays(each)), pod]
    found: Asked = {}
    for each in running:
        for name, amount in _asked(each).items():
            found[name] = found.get(name, Decimal(0)) + amount
    for each in inits:
        for name, amount in ({} if _stays(each) else _asked(each)).items():
            found[name] = max(amount, found.get(name, amount))
    return found


def _stays(init: Manifest) -> bool:
    return init.get("restartPolicy") == "Always"


def _asked(holder: Manifest) -> Asked:
    """Return the amounts of a container or pod. A limit without a request is also the request."""
    given = holder.get("resources") or {}
    limits = given.get("limits") or {}
    amounts = {"limits": limits, "requests": {**limits, **(given.get("requests") or {})}}
    return {
        f"{kind}.{name}": parse_quantity(amount)  # type: ignore[no-untyped-call]
        for kind in _AMOUNTS
        for name, amount in amounts[kind].items()
    }


Key = tuple[str, str]


def problem_word(found: Sequence[Problem]) -> Word | None:
    """Return the Accepted condition for taken names and refused children, or None.

    Temporary problems are not the user's error.
    """
    first = min(found, key=lambda each: each.passes, default=None)
    if first is None:
        return None
    reason = Reason.NAME_TAKEN
    if isinstance(first, Refused):
        reason = refusal(first.error.message, Reason.CHILD_REFUSED)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return ("Unknown" if first.passes else "False"), reason, first.message() + more


class Acceptance:
    """Acceptance of specs. Calls for one key must not overlap."""

    def __init__(self, cluster: Cluster, applier: Applier) -> None:
        self._cluster = cluster
        self._applier = applier
        self._accepted: dict[Key, str] = {}

    def judge(
        self, key: Key, seen: Seen, facts: Facts, live: Snapshot
    ) -> tuple[Word, Refused | None]:
        """Return the condition, and an error of the API server, if any.

        It is asked until it has accepted a revision: a refusal may end without a change of the
        spec.
        """
        word = plan.accepted(facts)
        if word[0] != "True":
            return word, None
        asked = f"{seen.generation} {sorted(target_revisions(facts).items())}"
        if self._accepted.get(key) == asked:
            return word, None
        try:
            problem = (
                problem_word(self._strangers(seen, facts, live))
                or self._secrets(facts)
                or self._refused(seen, facts)
            )
        except ClusterError as error:
            unknown = unanswered("the spec cannot be tested", error)
            return problem_word([unknown]) or word, unknown
        if problem is None:
            self._accepted[key] = asked
        return problem or word, None

    def _strangers(self, seen: Seen, facts: Facts, live: Snapshot) -> list[Taken]:
        """Return the names of future children that belong to other owners."""
        counts = {(role, facts.revision(role)): 1 for role in Role}
        objects = desired(facts, counts, seen.templates)
        written = {_name(each) for each in base(facts)}
        coming = [*objects.applied, *objects.created]
        return self._applier.strangers(
            (each for each in coming if _name(each) not in written), live
        )

    def _secrets(self, facts: Facts) -> Word | None:
        """Return a Secret that is missing, or not allowed by its owner."""
        if facts.settings.allow_any_secret:
            return None
        for name, field in _foreign_secrets(facts).items():
            secret = self._cluster.get("Secret", facts.owner.namespace, name)
            if secret is None:
                text = f"{field} names Secret {name}, which does not exist"
                return "False", Reason.SECRET_NOT_FOUND, text
            if not is_allowed(secret):
                text = (
                    f"{field} names Secret {name}, which lacks the label {LABEL_ALLOWED}={ALLOWED}:"
                    f" its owner may run `kubectl label secret {name} {LABEL_ALLOWED}={ALLOWED}`"
                )
                return "False", Reason.SECRET_NOT_ALLOWED, text
        return None

    def _refused(self, seen: Seen, facts: Facts) -> Word | None:
        """Return the API server's refusal of the pods of a new revision, or None."""
        for role in Role:
            revision = facts.revision(role)
            if (role, revision) in seen.workloads:
                continue
            manifest = deployment(facts, role, revision, 0, rendered(facts, role))
            message = self._applier.refusal(manifest)
            if message is None:
                message = self._applier.refusal_of_pods(manifest)
                message = None if message and _is_of_place(seen, facts, role, message) else message
            if message is not None:
                return "False", refusal(message, Reason.POD_TEMPLATE_INVALID), f"{role}: {message}"
        job = model_job(facts)
        message = None if job is None else self._applier.refusal(job)  # its pod may find room later
        return (
            None if message is None else ("False", Reason.POD_TEMPLATE_INVALID, f"model: {message}")
        )

    def forget(self, key: Key) -> None:
        self._accepted.pop(key, None)


def _foreign_secrets(facts: Facts) -> dict[str, str]:
    """Return foreign Secrets of the service, with the field that names them."""
    found = named_secrets(facts.spec)
    for role in Role:
        for name in foreign_secrets(facts.owner, rendered(facts, role)["spec"]):
            found.setdefault(name, f"spec.{role}.podTemplate")
    job = model_job(
        msgspec.structs.replace(facts, may_have_job=True)
    )  # a waiting one is made later
    pod = {} if job is None else job["spec"]["template"]["spec"]
    for name in foreign_secrets(facts.owner, pod):
        found.setdefault(name, f"spec.{answering_role(facts.spec)}.podTemplate")
    return found


def _is_of_place(seen: Seen, facts: Facts, role: Role, message: str) -> bool:
    """Return whether a quota refuses pods only because of those that they may replace."""
    if seen.spec.rollout.surge is Surge.ALWAYS or not gives_back(message):
        return False
    stables, wanted = seen.status.rollout.stable, plan.replicas(seen)
    rolling = [each for each in Role if stables.get(each) != facts.revision(each)]
    if not can_spare(wanted[each].replicas for each in rolling):
        return False
    stable = role, stables.get(role, "")
    there, template = seen.workloads.get(stable), seen.templates.get(stable)
    if there is None or not there.existing or template is None:
        return False
    return fits(rendered(facts, role)["spec"], template["spec"])


def refusal(message: str, otherwise: Reason) -> Reason:
    """Return the reason of a refusal; a quota has its own."""
    quota = is_full(message) or "failed quota" in message
    return Reason.QUOTA_EXCEEDED if quota else otherwise


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
