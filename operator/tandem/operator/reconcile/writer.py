"""Writes what a look decided: Secrets with keys, children, marks on pods; and prunes the rest."""

from __future__ import annotations

import secrets as randomness
from collections.abc import Mapping

import msgspec
import zmq

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.apply import Applier, marks
from tandem.operator.cluster.ownership import Taken
from tandem.operator.cluster.repair import Repairs
from tandem.operator.decide import plan
from tandem.operator.decide.keyring import KeyPlan
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.desired import secrets
from tandem.operator.desired.compose import Objects, base, desired
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Role
from tandem.operator.desired.pod import keys_secret
from tandem.operator.desired.router import canary_secret


class Writer:
    """Each method answers with the names that it found taken by somebody else."""

    def __init__(self, cluster: Cluster, applier: Applier, repairs: Repairs) -> None:
        self._cluster = cluster
        self._applier = applier
        self._repairs = repairs

    def secrets(
        self, facts: Facts, missing: list[Role], live: Snapshot
    ) -> tuple[dict[Role, str], list[Taken]]:
        """Draw the key pairs of ``facts.key_generation`` that are missing, and the canary's token.

        Public keys by role: the drawn one, or that of the Secret which came first.
        """
        publics: dict[Role, str] = {}
        taken: list[Taken] = []
        for role in missing:
            public, secret = (text.decode() for text in zmq.curve_keypair())
            there = self._applier.ensure(secrets.keys(facts, role, public, secret), live)
            if isinstance(there, Taken):
                taken.append(there)
            else:
                publics[role] = secrets.public_of(there)
        token = secrets.canary_token(facts, randomness.token_urlsafe(32))
        taken += self._applier.create([token], live)
        return publics, taken

    def base(self, facts: Facts, live: Snapshot) -> list[Taken]:
        """Children that belong to no revision."""
        return self._applier.apply(base(facts), live)

    def children(
        self,
        seen: Seen,
        facts: Facts,
        keys: KeyPlan,
        decided: Decision,
        live: Snapshot,
        *,
        may_start: bool,
    ) -> list[Taken]:
        """Children as decided, and pods marked before their Deployments shrink.

        What may not start gets no Job that fetches its model either.
        """
        for mark in marks(seen.pods, seen.workloads, decided.counts, decided.admitted):
            body = {"metadata": {"annotations": mark.annotations}}
            self._cluster.patch("Pod", seen.owner.namespace, mark.pod, body)
        keep = plan.kept(decided.counts, seen, plan.remembered(decided))
        counts = {key: count for key, count in decided.counts.items() if key in keep}
        routers = plan.reachable_routers(decided)
        objects = desired(facts, counts, seen.templates, routers=routers)
        made = [each for each in objects.created if may_start or each["kind"] != "Job"]
        repaired = Objects(applied=objects.applied, created=made)
        self._repairs.want((seen.owner.namespace, seen.owner.name), seen.owner.uid, repaired)
        taken = self._applier.create(made, live)
        before = {(each["kind"], each["metadata"]["name"]) for each in base(facts)}
        rest = [
            each
            for each in objects.applied
            if (each["kind"], each["metadata"]["name"]) not in before  # ``live`` lacks what is new
        ]
        taken += self._applier.apply(rest, live)
        names_kept = {(each["kind"], each["metadata"]["name"]) for each in objects.applied}
        names_kept |= {(each["kind"], each["metadata"]["name"]) for each in objects.created}
        names_kept |= _secrets_kept(facts, keys, facts.publics)
        self._applier.prune(live, names_kept, seen.owner.uid)
        return taken


def _secrets_kept(facts: Facts, keys: KeyPlan, publics: Mapping[str, str]) -> set[tuple[str, str]]:
    generations = {keys.generation, keys.active}
    generations |= {int(name.rpartition(".")[2]) for name in publics}
    kept = {("Secret", canary_secret(facts.owner))}
    for number in generations:
        at = msgspec.structs.replace(facts, key_generation=number)
        kept |= {("Secret", keys_secret(at, role)) for role in Role}
    return kept
