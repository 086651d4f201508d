"""The images on a cluster without the operator: restricted pods on two nodes answer over NIXL."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.e2e_cluster import access, line, pods
from tests.e2e_cluster.kube import Kube, wait_for
from tests.e2e_cluster.load import Load
from tests.e2e_cluster.setup import Setup

from tandem.protocol.names import LABEL_INSTANCE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def url(kube: Kube, setup: Setup) -> Iterator[str]:
    """Address of a router over a prefill and a decode worker, which sit on different nodes."""
    if not setup.models:
        pytest.skip("pods made by hand take the model from a folder of the nodes")
    free = (node for node in kube.items("nodes") if not node["spec"].get("taints"))
    nodes = [pods.name_of(node) for node in free]
    made = [line.worker(setup, "prefill", nodes[0]), line.worker(setup, "decode", nodes[-1])]
    made.append(line.router())
    kube.apply(*line.rights(kube), *made)
    kube.run("wait", "--for=condition=Ready", "--timeout=120s", "pod", "--all", seconds=130)
    yield access.open_port(kube, setup, "line", {LABEL_INSTANCE: line.NAME, **router_labels()})
    kube.run("delete", "pod", "--all", "--wait=false")


def router_labels() -> dict[str, str]:
    labels: dict[str, str] = line.router()["metadata"]["labels"]
    return {key: value for key, value in labels.items() if key.endswith("component")}


def test_the_line_answers_over_two_nodes(kube: Kube, url: str) -> None:
    """A chat answer names Paris, and its KV went from one node to the other over NIXL."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    samples = pods.metrics(kube, kube.get("pod", "decode"))
    assert pods.total(samples, "tandem:kv_handoff_bytes_total") > 0
    assert kube.run("logs", "decode").count("moves KV by nixl\n") == 1  # and by nothing else


@pytest.mark.nightly
def test_a_decode_worker_that_comes_and_goes_costs_nothing(
    kube: Kube, setup: Setup, url: str
) -> None:
    """Under load a second decode worker is found, drained and deleted: all tokens are right."""
    extra = line.worker(setup, "decode", None)
    extra["metadata"]["name"] = "decode-2"
    extra["spec"]["terminationGracePeriodSeconds"] = 90
    with Load(url, streams=4) as load:
        load.wait_served(4, 120)
        kube.apply(extra)
        wait_for("decode-2", lambda: pods.is_ready(kube.get("pod", "decode-2")), seconds=90)
        load.wait_served(8, 120)
        kube.delete("pod", "decode-2", seconds=120)
        load.wait_served(4, 120)
    load.assert_clean()
