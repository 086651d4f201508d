"""`make traces-cluster`: traces of a request and of the operator, on a cluster raised here.

Two nodes, the chart's operator, a service with ``observability.tracing`` whose pods kubelets run,
and an OpenTelemetry collector in a pod of another namespace, to which their spans go past the
NetworkPolicies. The request comes in at the Service's node port.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml
from tests.collector import draw, traces
from tests.collector.collector import build, configuration
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e_cluster.kube import Kube
    from tests.e2e_cluster.setup import Setup

PAGE, PICTURES = Path("docs/traces-cluster.md"), Path("docs/screens")
IMAGE = "docker.io/local/collector:1"
NAMESPACE, SERVICES, SERVICE = "tracing", "traced", "smollm2"
GRPC, HTTP = 4317, 4318
FILE = Path("/data/traces.json")
UP_SECONDS, TOLD_SECONDS = 180.0, 60.0
WORDS = "The quick brown fox jumps over the lazy dog, while it rains in Paris. "
PHASES = ("observe", "plan", "apply", "accept", "ask", "tell")
HEAD = """# Traces of a cluster

Result of `make traces-cluster` on {day}, on a cluster of two nodes with the chart's operator
(`tracing.endpoint`), a service with `spec.observability.tracing`, and an OpenTelemetry collector in
a pod of another namespace. All spans are listed in [tracing.md](tracing.md#traces).
"""


def main() -> int:
    """Write the page; 1 where a trace is not whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.collector.in_cluster")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the pictures")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the suite's helpers stand on it
    from tests.e2e_cluster.raised import raised

    with raised(build(), IMAGE) as (cluster, setup):
        request, look, pods = _traces(cluster, setup)
    problems = [*traces.faults(request, traces.PARENTS), *_faults_of_look(look)]
    problems += traces.strangers([*request, *look], pods)
    _write(options.page, options.pictures, request, look)
    for each in problems:
        print(f"fault: {each}")
    return int(bool(problems))


Spans = list[traces.Span]


def _traces(cluster: Kube, setup: Setup) -> tuple[Spans, Spans, dict[str, set[str]]]:
    """Of a request that both workers served, and of the look that made the service's pods; and the
    names of the pods of each service that makes spans."""
    from tests.e2e_cluster.images import reference
    from tests.e2e_cluster.install import install
    from tests.e2e_cluster.service import Service, prepare_namespace

    for name in (NAMESPACE, SERVICES):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    collector = cluster.within(NAMESPACE)
    collector.apply(*_collector(reference("worker")))
    collector.run("wait", "--for=condition=Ready", "pod/collector", "--timeout=60s")
    endpoint = f"http://collector.{NAMESPACE}:{GRPC}"
    operator = install(cluster, {"tracing.endpoint": endpoint})
    kube = cluster.within(SERVICES)
    prepare_namespace(kube, setup)
    tracing = {"endpoint": f"http://collector.{NAMESPACE}:{HTTP}", "samplePercent": 100}
    changes = {
        "observability": {"tracing": tracing},
        "engine": {"maxNumBatchedTokens": 64},
        "router": {"extraArgs": ["--strict-handoff"]},
    }
    service = Service(kube, setup, name=SERVICE, changes=changes)
    service.apply()
    service.wait_ready(UP_SECONDS)
    _ask(service.url(), 12)  # links and caches are warm then
    trace = _ask(service.url(), 16)

    def told() -> list[traces.Span]:
        return traces.parsed(collector.execute("collector", "cat", str(FILE), container="reader"))

    def request() -> list[traces.Span]:
        return traces.of(told(), trace)

    wait_for(
        lambda: not traces.faults(request(), traces.PARENTS),
        TOLD_SECONDS,
        every=1.0,
        seen=lambda: traces.faults(request(), traces.PARENTS),
    )
    pods = {f"tandem-{role}": service.pods(role) for role in ("router", "prefill", "decode")}
    pods["tandem-operator"] = operator.pods()
    named = {each: {pod["metadata"]["name"] for pod in found} for each, found in pods.items()}
    return request(), _look(told()), named


def _ask(url: str, repeats: int) -> str:
    """A streamed completion through the Service; the id of its trace, which is the caller's."""
    trace = os.urandom(16).hex()
    headers = {"traceparent": f"00-{trace}-{os.urandom(8).hex()}-01"}
    prompt = f"{trace}: {WORDS * repeats}"
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return trace


def _look(spans: list[traces.Span]) -> list[traces.Span]:
    """The look that applied Deployments of the service: of these, the one with the most writes."""
    looks = [
        traces.of(spans, each.trace)
        for each in spans
        if each.name == "reconcile" and each.attributes.get("tandem.service.name") == SERVICE
    ]
    making = [each for each in looks if any(map(_makes_pods, each))]
    return max(making, key=len, default=[])


def _makes_pods(span: traces.Span) -> bool:
    dry = span.attributes.get("tandem.dry_run", False)
    return span.name in ("create Deployment", "apply Deployment") and not dry


def _faults_of_look(spans: list[traces.Span]) -> list[str]:
    """Why a look's trace is not whole: each phase under the look, each call under a phase."""
    if not spans:
        return ["no trace of a look that applied a Deployment"]
    calls = {each.name for each in spans} - {"reconcile", *PHASES}
    parents: dict[str, tuple[str, ...]] = dict.fromkeys(calls, PHASES)
    parents |= dict.fromkeys(PHASES, ("reconcile",))
    return traces.faults(spans, parents)


def _collector(worker_image: str) -> list[dict[str, Any]]:
    """The pod, with a second container that can read what the collector writes, and its Service."""
    own = {"name": "collector", "namespace": NAMESPACE}
    labels = {"app": "collector"}
    receive = {"grpc": f"0.0.0.0:{GRPC}", "http": f"0.0.0.0:{HTTP}"}
    data = {"name": "data", "mountPath": str(FILE.parent)}
    containers = [
        {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "args": ["--config=file:/etc/collector/collector.yaml"],
            "volumeMounts": [{"name": "config", "mountPath": "/etc/collector"}, data],
        },
        {
            "name": "reader",
            "image": worker_image,
            "imagePullPolicy": "Never",
            "command": ["sleep", "3600"],
            "volumeMounts": [data],
        },
    ]
    volumes = [
        {"name": "config", "configMap": {"name": "collector"}},
        {"name": "data", "emptyDir": {}},
    ]
    files = {"collector.yaml": yaml.safe_dump(configuration(receive, FILE))}
    ports = [{"name": f"p{port}", "port": port} for port in (GRPC, HTTP)]
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": own, "data": files},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**own, "labels": labels},
            "spec": {"containers": containers, "volumes": volumes},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": own,
            "spec": {"selector": labels, "ports": ports},
        },
    ]


def _write(page: Path, pictures: Path, request: list[traces.Span], look: list[traces.Span]) -> None:
    parts = [HEAD.format(day=datetime.now(UTC).date().isoformat())]
    found = {
        "A request through the Service": ("trace-cluster-request.svg", request),
        "The reconcile pass that created the pods": ("trace-cluster-look.svg", look),
    }
    for title, (name, spans) in found.items():
        if spans:
            (pictures / name).write_text(draw.picture(spans, title))
            parts.append(f"## {title}\n\n![{title}](screens/{name})\n")
            parts.append(f"```\n{draw.text(spans)}```\n")
    page.write_text("\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
