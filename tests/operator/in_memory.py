"""A cluster in a dictionary around the real reconciler: for faults at one moment, which no real API
server makes on demand, and for many looks in no time.

It has objects, refusals, and what controllers and kubelets make of Deployments and Jobs; it has no
defaults, no admission, no managed fields and no garbage collection, of which other tests ask a real
API server. Looks are taken by the test, one at a time.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
from collections.abc import Callable, Iterable, Set
from typing import Any

from tests.operator.builders import service
from tests.operator.node import REPORT

from tandem.operator.api.status import Reason
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier
from tandem.operator.cluster.repair import Repairs
from tandem.operator.cluster.store import Store
from tandem.operator.decide.words import Verdict
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.probes.canary import Question
from tandem.operator.probes.keywatch import KeyWatch
from tandem.operator.probes.probing import Asked, Key, Probes
from tandem.operator.reconcile.reconciler import Reconciler
from tandem.operator.rehearse.rehearsal import NoReach, NoRefusals
from tandem.operator.settings import OperatorSettings
from tandem.protocol import names

Item = dict[str, Any]
KEY = ("ns", "demo")
MADE_AT = "2026-01-01T00:00:00Z"
Refusal = tuple[int, str]
"""Status and message of an API server that does not take an object."""
Said = Callable[[str, Item], Refusal | None]
"""What is said to a verb about an object; None takes it."""


class Memory(Cluster):
    """Objects of one namespace, whose changes the store of a look hears of at once."""

    def __init__(self) -> None:
        self.store = Store()
        self.objects: dict[tuple[str, str], Item] = {}
        """By kind and name, of this class alone: callers get copies."""
        self.refuse: Said = lambda _verb, _item: None
        self.writes: list[tuple[str, str, str]] = []
        """Verb, kind and name, in their order; statuses and dry runs are not among them."""
        self.events: list[Item] = []
        self._numbers = itertools.count(1)

    def number(self) -> str:
        return str(next(self._numbers))

    def put(self, kind: str, item: Item, *, heard: bool = True) -> Item:
        """An object is there, or is now so; as it is then. Unless ``heard`` its event is late."""
        made = {**copy.deepcopy(item), "kind": kind}
        metadata = made["metadata"]
        metadata.setdefault("namespace", KEY[0])
        metadata.setdefault("uid", f"uid-{self.number()}")
        metadata.setdefault("creationTimestamp", MADE_AT)
        metadata.setdefault("generation", 1)
        metadata["resourceVersion"] = self.number()
        for name, text in made.pop("stringData", {}).items():
            made.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        self.objects[(kind, metadata["name"])] = made
        if heard:
            self.store.put(kind, made)
        return copy.deepcopy(made)

    def _said(self, verb: str, item: Item, *, dry_run: bool = False) -> None:
        said = self.refuse("try" if dry_run else verb, item)
        if said is not None:
            raise ClusterError(said[0], "Refused", said[1])
        if not dry_run:
            self.writes.append((verb, item["kind"], item["metadata"]["name"]))

    def get(self, kind: str, namespace: str, name: str) -> Item | None:
        """An object; a claim is always there."""
        item = {"kind": kind, "metadata": {"name": name}}
        said = self.refuse("get", item)
        if said is not None:
            raise ClusterError(said[0], "Refused", said[1])
        if kind == "PersistentVolumeClaim":
            return {**item, "spec": {"accessModes": ["ReadOnlyMany"]}}
        return copy.deepcopy(self.objects.get((kind, name)))

    def create(self, manifest: Item, *, dry_run: bool = False) -> Item | None:
        """Make an object, or keep an event apart."""
        if manifest["kind"] == "Event":
            self.events.append(manifest)
            return manifest
        self._said("create", manifest, dry_run=dry_run)
        if dry_run:
            return manifest
        there = (manifest["kind"], manifest["metadata"]["name"]) in self.objects
        return None if there else self.put(manifest["kind"], manifest)

    def apply(self, manifest: Item, *, subresource: str = "", dry_run: bool = False) -> Item:
        """Take over what a manifest says; a status alone for that subresource."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        there = copy.deepcopy(self.objects[(kind, name)])
        if subresource:
            return self.put(kind, {**there, "status": manifest["status"]})
        self._said("apply", manifest, dry_run=dry_run)
        metadata = {**there["metadata"], **manifest["metadata"]}
        metadata["generation"] += manifest.get("spec") != there.get("spec")
        return self.put(kind, {**there, **manifest, "metadata": metadata})

    def patch(self, kind: str, namespace: str, name: str, body: Item) -> Item | None:
        there = copy.deepcopy(self.objects[(kind, name)])
        self._said("patch", {**there, **body, "metadata": {**body["metadata"], "name": name}})
        kept = {**there["metadata"].get("annotations", {}), **body["metadata"]["annotations"]}
        there["metadata"]["annotations"] = {k: v for k, v in kept.items() if v is not None}
        return self.put(kind, there)

    def delete(self, kind: str, namespace: str, name: str, *, uid: str | None = None) -> None:
        self._said("delete", {"kind": kind, "metadata": {"name": name}})
        gone = self.objects.pop((kind, name))
        self.store.drop(kind, (KEY[0], name), gone["metadata"]["uid"], self.number())

    def of(self, kind: str) -> list[Item]:
        return [copy.deepcopy(each) for (its, _), each in self.objects.items() if its == kind]

    def run(self, is_ready: Callable[[Item], bool] = lambda _pod: True) -> None:
        """Controllers make pods, kubelets run those that ``is_ready``, and Jobs are done."""
        for deployment in self.of("Deployment"):
            self._scale(deployment)
        for pod in self.of("Pod"):
            if names.LABEL_ROLE in pod["metadata"]["labels"]:
                ready = {"type": "Ready", "status": "True" if is_ready(pod) else "False"}
                status = {"podIP": "10.0.0.1", "phase": "Running", "conditions": [ready]}
                self.put("Pod", {**pod, "status": status})
        for job in self.of("Job"):
            if "status" not in job:
                self._finish(job)

    def _scale(self, deployment: Item) -> None:
        name, wanted = deployment["metadata"]["name"], deployment["spec"]["replicas"]
        pods = [each for each in self.of("Pod") if each["metadata"]["name"].startswith(f"{name}-")]
        for pod in pods[wanted:]:
            gone = self.objects.pop(("Pod", pod["metadata"]["name"]))
            where = (KEY[0], pod["metadata"]["name"])
            self.store.drop("Pod", where, gone["metadata"]["uid"], self.number())
        template = deployment["spec"]["template"]
        for _ in range(len(pods), wanted):
            owner = {"kind": "ReplicaSet", "name": f"{name}-x", "uid": "x", "controller": True}
            metadata = {"name": f"{name}-{self.number()}", "ownerReferences": [owner]}
            metadata["labels"] = template["metadata"]["labels"]
            self.put("Pod", {"metadata": metadata, "spec": template["spec"], "status": {}})
        seen = deployment["metadata"]["generation"]
        status = {"replicas": wanted, "observedGeneration": seen}
        self.put("Deployment", {**deployment, "status": status})

    def _finish(self, job: Item) -> None:
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        self.put("Job", {**job, "status": done})
        owner = {"kind": "Job", "name": name, "uid": uid, "controller": True}
        labels = {names.LABEL_SERVICE: KEY[1]}
        ended = {"terminated": {"exitCode": 0, "message": json.dumps(REPORT)}}
        status = {"phase": "Succeeded", "containerStatuses": [{"name": "fetch", "state": ended}]}
        metadata = {"name": f"{name}-pod", "labels": labels, "ownerReferences": [owner]}
        self.put("Pod", {"metadata": metadata, "spec": {}, "status": status})


class Answers(Probes):
    """Canaries whose answers are there as soon as they are asked: as ``is_right`` says."""

    def __init__(self) -> None:
        super().__init__(60.0, lambda _key: None)
        self.is_right = True
        self.asked = 0
        self.questions: list[Question] = []

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        known = self.known(key)
        for name in known.asked.keys() - about:
            del known.asked[name]
        for question in (asked := list(questions)):
            self.asked += 1
            self.questions.append(question)
            reason = Reason.CANARY_OK if self.is_right else Reason.CANARY_FAILED
            said = Verdict(
                ok=self.is_right, reason=reason, message="asked", targets=question.targets, at=0
            )
            known.asked[question.targets] = Asked(verdict=said)
        return 60.0 if asked else None


class ReadKeys(KeyWatch):
    def all_read(self, *_: Any) -> bool:
        return True


class Demo:
    """The LLMService ``demo`` of a spec, and an operator of its own."""

    def __init__(self, **changes: Any) -> None:
        self.cluster = Memory()
        self.probes = Answers()
        self.woken: list[Key] = []
        self.failure: ClusterError | None = None
        self.cluster.put("LLMService", service(**changes))
        self.repairs, self.reconciler = self._operator()

    def _operator(self) -> tuple[Repairs, Reconciler]:
        cluster, applier, wake = self.cluster, Applier(self.cluster), self.woken.append
        repairs = Repairs(cluster, applier, wake, OperatorMetrics())
        reconciler = Reconciler(
            cluster,
            cluster.store,
            OperatorSettings(own_namespace="system"),
            self.probes,
            applier,
            repairs,
            ReadKeys(cluster, wake),
            NoRefusals(),
            NoReach(cluster),
        )
        return repairs, reconciler

    def succeed(self) -> None:
        """Another operator goes on, which remembers nothing."""
        self.close()
        self.probes = Answers()
        self.repairs, self.reconciler = self._operator()

    def close(self) -> None:
        self.repairs.close()
        self.probes.close()

    def look(self) -> float | None:
        return self.reconciler(KEY)

    def turn(self, number: int = 1, is_ready: Callable[[Item], bool] = lambda _pod: True) -> None:
        """So many looks, after each of which nodes and controllers do their part. What the last one
        failed with is its ``failure``."""
        for _ in range(number):
            self.failure = None
            try:
                self.look()
            except ClusterError as error:
                self.failure = error
            self.cluster.run(is_ready)

    def change(self, *, heard: bool = True, **changes: Any) -> None:
        """The spec is this one now, though unless ``heard`` its event is on its way yet."""
        there = copy.deepcopy(self.cluster.objects[("LLMService", KEY[1])])
        there["metadata"]["generation"] += 1
        spec = service(**changes)["spec"]
        self.cluster.put("LLMService", {**there, "spec": spec}, heard=heard)

    def status(self) -> Item:
        there = self.cluster.get("LLMService", *KEY)
        assert there is not None
        status: Item = there.get("status", {})
        return status

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        for each in self.status().get("conditions", ()):
            if each["type"] == kind:
                return each["status"], each["reason"], each["message"]
        return "", "", ""

    def replicas(self, role: str) -> dict[str, int]:
        return {
            each["metadata"]["name"]: each["spec"]["replicas"]
            for each in self.cluster.of("Deployment")
            if f"-{role}-" in each["metadata"]["name"]
        }

    def marked(self) -> set[str]:
        return {
            each["metadata"]["name"]
            for each in self.cluster.of("Pod")
            if each["metadata"].get("annotations", {}).get(names.ANNOTATION_DRAINING) == "true"
        }
