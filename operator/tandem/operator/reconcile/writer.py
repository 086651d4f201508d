"""Writes what a look decided: Secrets with keys, children, marks on pods; and prunes the rest.

A refusal of the API server holds back only the writes that depend on the refused one: ``resizing``
has these for Deployments.
"""

from __future__ import annotations

import secrets as randomness
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.apply import Applier, Problem
from tandem.operator.cluster.refused import Refused
from tandem.operator.cluster.repair import Repairs
from tandem.operator.decide import plan
from tandem.operator.decide.keyring import KeyPlan
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.desired import secrets
from tandem.operator.desired.compose import Objects, base, desired
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.pod import keys_secret
from tandem.operator.desired.references import secrets_of
from tandem.operator.desired.router import canary_secret
from tandem.operator.reconcile.resizing import Resizing, size_of


class Writer:
    """Each method answers with what could not be written, and raises ClusterError where nothing can
    be."""

    def __init__(self, cluster: Cluster, applier: Applier, repairs: Repairs) -> None:
        self._cluster = cluster
        self._applier = applier
        self._repairs = repairs

    def secrets(
        self, facts: Facts, missing: list[Role], live: Snapshot
    ) -> tuple[dict[Role, str], list[Problem]]:
        """Draw the key pairs of ``facts.key_generation`` that are missing, and the canary's token.

        Public keys by role: the drawn one, or that of the Secret which came first.
        """
        publics: dict[Role, str] = {}
        found: list[Problem] = []
        for role in missing:
            public, secret = (text.decode() for text in zmq.curve_keypair())
            there = self._applier.ensure(secrets.keys(facts, role, public, secret), live)
            if isinstance(there, dict):
                publics[role] = secrets.public_of(there)
            else:
                found.append(there)
        token = secrets.canary_token(facts, randomness.token_urlsafe(32))
        found += self._applier.create([token], live)
        return publics, found

    def base(self, facts: Facts, live: Snapshot) -> list[Problem]:
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
        before: Sequence[Problem],
        may_start: bool,
    ) -> list[Problem]:
        """Children as decided, and pods marked before their Deployments shrink.

        With problems ``before`` nothing new is made: pods need what could not be written. What may
        not start gets no Job that fetches its model either.
        """
        keep = plan.kept(decided.counts, seen, plan.remembered(decided))
        counts = {key: count for key, count in decided.counts.items() if key in keep}
        objects = desired(facts, counts, seen.templates, routers=decided.routers)
        services = _of("Service", objects.applied)
        sizes = [size_of(each, live) for each in _of("Deployment", objects.applied)]
        shown = [size.manifest for size in sizes if size.before is not None or not before]
        made = [
            each
            for each in objects.created
            if (not before or live.find(each["kind"], each["metadata"]["name"]))
            and (may_start or each["kind"] != "Job")
        ]
        resizing = Resizing(self._cluster, self._applier, seen, decided, live)
        if not resizing.admit():
            # Clients stay where they are.
            services = [s for s in services if not live.find("Service", s["metadata"]["name"])]
        key, uid = (seen.owner.namespace, seen.owner.name), seen.owner.uid
        others = ("Service", "Deployment")
        rest = [*(each for each in objects.applied if each["kind"] not in others), *services]
        self._repairs.want(key, uid, Objects(applied=[*rest, *shown], created=made))
        found = self._applier.apply(services, live)
        is_reachable = not found
        coming = {size.manifest["metadata"]["name"] for size in sizes if size.before is None}
        templates = {
            name: each
            for each in _of("ControllerRevision", made)
            if (name := each["metadata"]["name"]) in coming
        }
        found += self._applier.create(
            [each for each in made if each not in templates.values()], live
        )
        may_make = is_reachable and not before
        found += resizing.run(sizes, templates, may_make=may_make, is_reachable=is_reachable)
        if resizing.kept:  # who scales one by hand meanwhile is not helped to let it fall
            held = {
                size.manifest["metadata"]["name"]: size.at(resizing.kept[size.key])
                for size in sizes
                if size.key in resizing.kept
            }
            shown = [held.get(each["metadata"]["name"], each) for each in shown]
            self._repairs.want(key, uid, Objects(applied=[*rest, *shown], created=made))
        found += self._applier.rewrite(live, seen.owner.uid)
        names_kept = {(each["kind"], each["metadata"]["name"]) for each in objects.applied}
        names_kept |= {(each["kind"], each["metadata"]["name"]) for each in objects.created}
        names_kept |= _secrets_kept(facts, keys, facts.publics)
        if not {("Secret", name) for name in live.names("Secret")} <= names_kept:
            names_kept |= _secrets_mounted(objects.applied, live)
        if not any(isinstance(each, Refused) for each in (*before, *found)):
            found += self._applier.prune(live, names_kept, seen.owner.uid)
        return found


def _of(kind: str, manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def _secrets_mounted(applied: list[Manifest], live: Snapshot) -> set[tuple[str, str]]:
    """Secrets that a Deployment which stays, or a pod which is there, mounts: however they are
    named, a pod made of that template cannot start without them."""
    specs = [each["spec"]["template"]["spec"] for each in _of("Deployment", applied)]
    specs += [each.get("spec") for each in live.of("Pod")]
    return {("Secret", name) for spec in specs for name in secrets_of(spec)}


def _secrets_kept(facts: Facts, keys: KeyPlan, publics: Mapping[str, str]) -> set[tuple[str, str]]:
    generations = {keys.generation, keys.active}
    generations |= {int(name.rpartition(".")[2]) for name in publics}
    kept = {("Secret", canary_secret(facts.owner))}
    for number in generations:
        at = msgspec.structs.replace(facts, key_generation=number)
        kept |= {("Secret", keys_secret(at, role)) for role in Role}
    return kept
