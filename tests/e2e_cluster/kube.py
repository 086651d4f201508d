"""kubectl with deadlines, and the few questions that the suite asks again and again.

Everything goes through kubectl, so that the suite sees what a person sees and runs against any
cluster. Pods are asked from within, by exec: no network policy or address stands in between.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]

EXEC_SECONDS = 30.0
READ_URL = (
    "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"
)


class KubeError(Exception):
    """kubectl failed; the message is what it said."""


@dataclass(frozen=True)
class Kube:
    """One cluster and one namespace of it."""

    kubeconfig: str
    namespace: str = "default"

    def within(self, namespace: str) -> Kube:
        return replace(self, namespace=namespace)

    def run(self, *arguments: str, stdin: str | None = None, seconds: float = 60.0) -> str:
        """kubectl's output. Raises KubeError with what it said, at the deadline too."""
        words = ["kubectl", "--kubeconfig", self.kubeconfig, "-n", self.namespace, *arguments]
        try:
            done = subprocess.run(
                words,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubeError(f"{' '.join(words)}: not done after {seconds:g} s") from error
        if done.returncode:
            raise KubeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *objects: Json, dry_run: bool = False) -> str:
        """Apply objects on the server's side; returns what kubectl said."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        words = ["apply", "--server-side", "-f", "-", *(["--dry-run=server"] if dry_run else [])]
        return self.run(*words, stdin=json.dumps(listed))

    def refusal(self, *objects: Json) -> str:
        """What the API server says against these objects. Fails when it takes them."""
        try:
            said = self.apply(*objects, dry_run=True)
        except KubeError as error:
            return str(error)
        raise AssertionError(f"the API server took it: {said}")

    def find(self, kind: str, name: str) -> Json | None:
        """An object, or None where there is none."""
        words = ("get", kind, name, "--ignore-not-found", "-o", "json")
        text = self.run(*words)
        return json.loads(text) if text.strip() else None

    def get(self, kind: str, name: str) -> Json:
        found = self.find(kind, name)
        assert found is not None, f"there is no {kind} {name} in {self.namespace}"
        return found

    def items(self, kind: str, selector: str = "") -> list[Json]:
        """Objects of a kind (or several, with commas) by labels."""
        chosen = ["-l", selector] if selector else []
        items: list[Json] = json.loads(self.run("get", kind, *chosen, "-o", "json"))["items"]
        return items

    def delete(self, kind: str, name: str, *more: str, seconds: float = 60.0) -> None:
        """Delete an object; it may be gone already."""
        self.run("delete", kind, name, "--ignore-not-found", *more, seconds=seconds)

    def patch(self, kind: str, name: str, patch: Json) -> Json:
        """A merge patch; the object as the API server then has it."""
        words = ("patch", kind, name, "--type=merge", "-p", json.dumps(patch), "-o", "json")
        patched: Json = json.loads(self.run(*words))
        return patched

    def execute(self, pod: str, *command: str, container: str = "main") -> str:
        """Output of a command in a pod."""
        words = ("exec", pod, "-c", container, "--", *command)
        return self.run(*words, seconds=EXEC_SECONDS)

    def read_url(self, pod: str, url: str, *, container: str = "main") -> str:
        """What a pod reads from a URL, by its own Python."""
        return self.execute(pod, "python3", "-c", READ_URL, url, container=container)


def wait_for(what: str, condition: Callable[[], Any], *, seconds: float, every: float = 0.5) -> Any:
    """Poll until ``condition`` gives something true, which is returned; fails when a look that was
    begun after the deadline finds nothing: one before it may have looked early, and lasted.

    An error of kubectl counts as not yet: an API server that is briefly away is no failure.
    """
    end, last = time.monotonic() + seconds, ""
    while True:
        is_late = time.monotonic() >= end
        try:
            if found := condition():
                return found
        except KubeError as error:
            last = f"; kubectl said: {error}"
        assert not is_late, f"waited {seconds:g} s for {what}{last}"
        time.sleep(every)


def conditions(resource: Json) -> dict[str, Json]:
    """Conditions of an object by their types."""
    return {each["type"]: each for each in resource.get("status", {}).get("conditions", [])}


def is_true(resource: Json | None, condition: str) -> bool:
    if resource is None:
        return False
    found = conditions(resource).get(condition)
    current = resource["metadata"].get("generation", 0)
    return (
        found is not None
        and found["status"] == "True"
        and found.get("observedGeneration", current) == current
    )
