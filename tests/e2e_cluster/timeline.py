"""Where the time goes from `kubectl apply` to the first token, as a table for the test's output.

A report, not an assertion: the aim is 15 s, at most 30, with images and pages in memory; it took
15 to 41 s on machines of one kind (most beside other tests), and 51 with torch's libraries on a
cold disk.
Kubernetes' own times are whole seconds; what the suite measures itself is finer.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
from tests.e2e_cluster import pods
from tests.e2e_cluster.kube import conditions
from tests.e2e_cluster.service import NAME, QUESTION, Service

CONDITIONS = ("Accepted", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "Servable")


@dataclass
class Timeline:
    applied: datetime = field(default_factory=lambda: datetime.now(UTC))
    _start: float = field(default_factory=time.monotonic)
    moments: list[tuple[float, str]] = field(default_factory=list)

    def now(self, what: str) -> float:
        """Record a moment that the suite sees itself; its seconds."""
        seconds = time.monotonic() - self._start
        self.moments.append((seconds, what))
        return seconds

    def at(self, when: datetime | None, what: str) -> None:
        if when is not None:
            self.moments.append(((when - self.applied).total_seconds(), what))

    def add_objects(self, service: Service) -> None:
        """Record what the service's pods and conditions say."""
        found = service.get()
        for kind in (*CONDITIONS, "Ready"):
            condition = conditions(found).get(kind)
            if condition and condition["status"] == "True":
                self.at(datetime.fromisoformat(condition["lastTransitionTime"]), kind)
        for role in ("prefill", "decode", "router"):
            for pod in service.pods(role):
                self.at(pods.since(pod, "PodScheduled"), f"{role} pod scheduled")
                self.at(pods.started(pod), f"{role} container started")
                self.at(pods.ready_since(pod), f"{role} pod ready")

    def table(self) -> str:
        return "\n".join(f"{seconds:7.1f} s  {what}" for seconds, what in sorted(self.moments))


def first_token(url: str, *, seconds: float) -> str:
    """Ask until a streamed answer begins; the whole answer's text."""
    end, last = time.monotonic() + seconds, ""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
    }
    while time.monotonic() < end:
        try:
            with httpx.stream(
                "POST", f"{url}/v1/chat/completions", json=body, timeout=60
            ) as answer:
                if answer.status_code == 200:
                    return _text(answer)
                last = f"{answer.status_code} {answer.read()[:200]!r}"
        except httpx.HTTPError as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.1)
    raise AssertionError(f"no token after {seconds:g} s: {last}")


def _text(answer: httpx.Response) -> str:
    text = ""
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
    return text
