"""Traces of looks at services: of what they are made, which looks leave one, where they go."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from otlp_receiver import Receiver
from tests.waiting import wait_for

from tandem.operator import look
from tandem.operator.api.values import API_VERSION
from tandem.operator.cluster import ClusterError
from tandem.operator.look import MAX_CALLS, Key, LookRecord, Trigger
from tandem.operator.reconcile.traced import Target, Tracer, target_of
from tandem.operator.settings import OperatorSettings
from tandem.protocol.errors import InvalidParameter
from tandem.tracing.spans import Spans

KEY = ("ns", "demo")
DEPLOYMENTS = "/apis/apps/v1/namespaces/ns/deployments"
APPLY = "application/apply-patch+yaml"
SECONDS = 20.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A real one, by gRPC and by HTTP."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def traced(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tracer]]:
    """Makes tracers that send there; they are closed at the end."""
    made: list[Tracer] = []

    def make(*, by_http: bool = False, ratio: float = 1.0) -> Tracer:
        protocol = "http/protobuf" if by_http else "grpc"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(ratio))
        settings = OperatorSettings(
            otlp_traces_endpoint=receiver.http_url if by_http else receiver.grpc_url,
        )
        spans = Spans(settings, "tandem-operator", "me", begins_traces=True, namespace="home")
        made.append(Tracer(spans))
        return made[-1]

    yield make
    for each in made:
        each.close()


def because(key: Key) -> list[Trigger]:
    assert key == KEY
    return [Trigger.SERVICE, Trigger.CHILD]


def called(method: str, path: str, status: int = 200, **given: Any) -> None:
    """A call to the API server, as its client notes it."""
    told = {"content_type": "application/json", "dry_run": False, "name": "", **given}
    content_type = told.pop("content_type")
    look.called(method, path, content_type, begin=time.monotonic(), status=status, **told)


def reconcile(key: Key) -> float | None:
    """A look that reads, writes and is told no."""
    look.enter("observe")
    look.saw(7)
    called("GET", f"{DEPLOYMENTS}/demo-prefill")
    look.enter("apply")
    called("POST", DEPLOYMENTS, 201, dry_run=True)
    called("POST", DEPLOYMENTS, 409, name="demo-decode")
    called("PATCH", f"{DEPLOYMENTS}/demo-decode", content_type=APPLY)
    look.enter("tell")
    called("PATCH", f"/apis/{API_VERSION}/namespaces/ns/llmservices/demo/status")
    return 5.0


def quiet(key: Key) -> float | None:
    """A look that finds nothing to do: it reads, and asks without writing."""
    look.enter("observe")
    called("GET", f"{DEPLOYMENTS}/demo-prefill")
    called("POST", DEPLOYMENTS, 201, dry_run=True)
    return None


@pytest.mark.parametrize("by_http", [False, True], ids=["grpc", "http"])
def test_a_look_that_wrote_is_one_trace(
    receiver: Receiver,
    traced: Callable[..., Tracer],
    monkeypatch: pytest.MonkeyPatch,
    by_http: bool,
) -> None:
    """The look, its phases under it, calls to the API server in the phase that made them."""
    monkeypatch.setenv("TANDEM_POD_NAME", "operator-0")
    tracer = traced(by_http=by_http)
    assert tracer.looks(reconcile, because)(KEY) == 5.0
    tracer.close()
    (root,) = receiver.named("reconcile")
    assert root["parent"] == ""
    assert not root["error"]
    resource = {key: root["resource"][key] for key in ("service.name", "k8s.pod.name")}
    assert resource == {"service.name": "tandem-operator", "k8s.pod.name": "operator-0"}
    assert root["resource"]["k8s.namespace.name"] == "home"
    assert root["attributes"] == {
        "tandem.service.namespace": "ns",
        "tandem.service.name": "demo",
        "tandem.service.generation": 7,
        "tandem.reconcile.reasons": ["child changed", "service changed"],
        "tandem.reconcile.outcome": "wrote",
        "tandem.reconcile.num_writes": 3,
        "tandem.reconcile.num_reads": 1,
        "tandem.reconcile.again_seconds": 5.0,
    }
    spans = {span["id"]: span for span in receiver.of(root["trace"])}
    tree = sorted(
        (spans[each["parent"]]["name"], each["name"], each["error"])
        for each in spans.values()
        if each is not root
    )
    assert tree == [
        ("apply", "apply Deployment", False),
        ("apply", "create Deployment", False),
        ("apply", "create Deployment", True),
        ("observe", "get Deployment", False),
        ("reconcile", "apply", False),
        ("reconcile", "observe", False),
        ("reconcile", "tell", False),
        ("tell", "patch LLMService", False),
    ]
    (told,) = receiver.named("patch LLMService")
    assert told["attributes"] == {
        "http.request.method": "PATCH",
        "http.response.status_code": 200,
        "tandem.object.kind": "LLMService",
        "tandem.object.namespace": "ns",
        "tandem.object.name": "demo",
        "tandem.object.subresource": "status",
    }
    dry = {each["error"]: each["attributes"] for each in receiver.named("create Deployment")}
    assert (dry[False]["tandem.dry_run"], "tandem.dry_run" in dry[True]) == (True, False)
    assert dry[True]["tandem.object.name"] == "demo-decode"
    for each in spans.values():
        above = spans.get(each["parent"], each)
        assert above["begin"] <= each["begin"] <= each["end"] <= above["end"]


def test_a_look_that_found_nothing_to_do_leaves_no_trace(
    receiver: Receiver, traced: Callable[..., Tracer]
) -> None:
    """Whatever it read or asked without writing; one that wrote does, right beside it."""
    tracer = traced()
    for _ in range(50):
        assert tracer.looks(quiet, because)(KEY) is None
    tracer.looks(reconcile, because)(KEY)
    tracer.close()
    assert len(receiver.named("reconcile")) == 1
    assert {each["trace"] for each in receiver.spans} == {receiver.named("reconcile")[0]["trace"]}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClusterError(403, "Forbidden", "no rights"), "ClusterError"),
        (KeyError("replicas"), "KeyError"),
    ],
)
def test_a_look_that_failed_says_so(
    receiver: Receiver, traced: Callable[..., Tracer], error: Exception, kind: str
) -> None:
    """Itself and the phase in which it failed; the queue hears of the failure all the same."""

    def fails(key: Key) -> float | None:
        quiet(key)
        look.enter("plan")
        raise error

    tracer = traced()
    with pytest.raises(type(error)):
        tracer.looks(fails, because)(KEY)
    tracer.close()
    told = {each["name"]: each for each in receiver.spans}
    assert {name for name, each in told.items() if each["error"]} == {"reconcile", "plan"}
    assert told["reconcile"]["attributes"]["error.type"] == kind
    assert told["reconcile"]["attributes"]["tandem.reconcile.outcome"] == "failed"
    assert told["reconcile"]["attributes"]["tandem.reconcile.num_writes"] == 0


def test_a_phase_that_met_an_error_says_so_though_the_look_went_on(
    receiver: Receiver, traced: Callable[..., Tracer]
) -> None:
    """What was refused is told where it was, and the look as a whole has failed."""

    def goes_on(key: Key) -> None:
        quiet(key)
        look.enter("apply")
        error = ClusterError(403, "Forbidden", "exceeded quota")
        look.met(error)
        look.enter("tell")
        raise error

    tracer = traced()
    with pytest.raises(ClusterError):
        tracer.looks(goes_on, because)(KEY)
    tracer.close()
    assert {each["name"] for each in receiver.spans if each["error"]} == {"reconcile", "apply"}


def test_a_share_of_looks_leaves_traces(receiver: Receiver, traced: Callable[..., Tracer]) -> None:
    """None at 0, some of many at a half, and each of those whole."""
    for ratio in (0.0, 0.5):
        tracer = traced(ratio=ratio)
        for _ in range(200):
            tracer.looks(reconcile, because)(KEY)
        tracer.close()
        assert (ratio == 0.0) == (not receiver.spans)
    traces = {each["trace"] for each in receiver.spans}
    assert 50 < len(traces) < 150
    assert len(receiver.spans) == 9 * len(traces)


def test_a_repair_is_a_trace_of_its_own(receiver: Receiver, traced: Callable[..., Tracer]) -> None:
    """Beside looks, with what it wrote right under it."""
    tracer = traced()
    with tracer.beside("repair", KEY, [Trigger.CHILD]):
        called("POST", DEPLOYMENTS, 201)
    tracer.close()
    (root,), (made,) = receiver.named("repair"), receiver.named("create Deployment")
    assert made["parent"] == root["id"]
    assert root["attributes"]["tandem.reconcile.reasons"] == ["child changed"]


def test_calls_of_a_look_are_bounded(receiver: Receiver, traced: Callable[..., Tracer]) -> None:

    def long(_: Key) -> None:
        for _number in range(MAX_CALLS + 3):
            called("DELETE", f"{DEPLOYMENTS}/demo-decode")

    tracer = traced()
    tracer.looks(long, because)(KEY)
    tracer.close()
    wait_for(lambda: bool(receiver.named("reconcile")), SECONDS)
    assert len(receiver.named("delete Deployment")) == MAX_CALLS
    (root,) = receiver.named("reconcile")
    assert root["attributes"]["tandem.reconcile.num_dropped"] == 3
    assert root["attributes"]["tandem.reconcile.num_writes"] == MAX_CALLS + 3


def test_without_an_endpoint_nothing_is_recorded() -> None:
    """The queue calls the looks themselves, and nothing of OpenTelemetry is imported."""
    tracer = Tracer(None)
    assert tracer.looks(quiet, because) is quiet
    with tracer.beside("repair", KEY, [Trigger.CHILD]):
        called("POST", DEPLOYMENTS, 201)
    tracer.close()
    code = (
        "import sys; from tandem.operator.run import Operator, OperatorSettings; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/api/v1/namespaces/ns/pods/a", Target("Pod", "ns", "a", "")),
        ("/api/v1/namespaces/ns/pods/a/status", Target("Pod", "ns", "a", "status")),
        ("/api/v1/pods", Target("Pod", "", "", "")),
        (DEPLOYMENTS, Target("Deployment", "ns", "", "")),
        ("/apis/batch/v1/namespaces/ns/jobs/b", Target("Job", "ns", "b", "")),
        ("/apis/apps/v1/replicasets", Target("replicasets", "", "", "")),
    ],
)
def test_paths_are_read(path: str, target: Target) -> None:
    """Kind, namespace, name and subresource; a kind that is not known goes by its plural."""
    assert target_of(path) == target


def test_a_record_is_of_its_block_alone() -> None:
    """Before and after it nothing is noted anywhere."""
    record = LookRecord("reconcile", KEY, ())
    called("DELETE", f"{DEPLOYMENTS}/before")
    with look.recording(record):
        called("DELETE", f"{DEPLOYMENTS}/within")
    called("DELETE", f"{DEPLOYMENTS}/after")
    assert [call.path.rpartition("/")[2] for call in record.calls] == ["within"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("otlp_traces_endpoint", "collector:4317"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name):
        OperatorSettings(**{name: value})
