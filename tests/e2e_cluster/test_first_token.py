"""From `helm install` and `kubectl apply` to an answer: KV crosses nodes, and the time is told."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from tests.e2e_cluster import pods, timeline
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Kube, wait_for
from tests.e2e_cluster.load import Load
from tests.e2e_cluster.service import NAME, QUESTION, Service
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.timeline import Timeline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def test_apply_to_first_token(
    kube: Kube, setup: Setup, operator: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample answers after its apply, and a table says where the seconds went."""
    served = Service(kube, setup)
    line = Timeline()
    served.apply()
    line.now("applied")
    wait_for("the router's Service", lambda: kube.find("service", NAME), seconds=20)
    wait_for("a ready router", lambda: any(map(pods.is_ready, served.pods("router"))), seconds=120)
    line.now("router seen ready")
    url = served.url()
    text = timeline.first_token(url, seconds=60)
    line.now("first answer's end")
    served.wait_ready()
    line.add_objects(served)
    with capsys.disabled():
        print(f"\noperator installed in {operator.seconds:.1f} s\n{line.table()}")

    assert "Paris" in text
    served.leave()


def test_the_openai_client_gets_paris(service: Service) -> None:
    """The OpenAI package asks through the Service, with a stream and without."""
    question: ChatCompletionUserMessageParam = {"role": "user", "content": QUESTION}
    ask: dict[str, Any] = {"model": NAME, "temperature": 0.0, "max_tokens": 16}
    with openai.OpenAI(base_url=f"{service.url()}/v1", api_key="none", timeout=60) as client:
        whole = client.chat.completions.create(messages=[question], stream=False, **ask)
        assert "Paris" in (whole.choices[0].message.content or "")
        parts = client.chat.completions.create(messages=[question], stream=True, **ask)
        with parts:
            text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert "Paris" in text


def test_kv_crosses_the_nodes_over_nixl(service: Service) -> None:
    """Prefill and decode sit on different nodes, and their metrics show bytes moved by NIXL."""
    (prefill,), (decode,) = service.pods("prefill"), service.pods("decode")
    assert pods.node_of(prefill) != pods.node_of(decode)
    with Load(service.url(), streams=2) as load:
        load.wait_served(4, 120)
    load.assert_clean()

    samples = pods.metrics(service.kube, decode)
    assert pods.total(samples, "tandem:kv_handoff_bytes_total") > 0, samples
    log = service.kube.run("logs", pods.name_of(decode), "-c", "main")
    assert log.count("moves KV by nixl\n") == 1  # and by nothing else


def test_the_service_answers_inside_the_cluster(service: Service) -> None:
    """status.url is what a client in the cluster uses: a pod of no service asks it by name."""
    url = service.get()["status"]["url"]
    service.kube.apply(pods.bystander("client"))
    ready = ("wait", "--for=condition=Ready", "pod/client", "--timeout=60s")
    service.kube.run(*ready, seconds=70)
    assert NAME in service.kube.read_url("client", f"{url}/models")
    service.kube.delete("pod", "client", "--wait=false")


@pytest.mark.nightly
def test_the_model_may_come_as_an_image(service: Service, setup: Setup) -> None:
    """The same service from an image volume: a new revision that answers as before."""
    if not setup.model_image:
        pytest.skip("no image with the model")
    image = {"reference": setup.model_image, "pullPolicy": "IfNotPresent"}
    service.patch(
        model={"source": {"type": "Image", "image": image, "persistentVolumeClaim": None}}
    )
    service.wait_stable()
    (decode,) = service.wait_pods("decode", 1)
    assert any("image" in volume for volume in decode["spec"]["volumes"])
    assert "Paris" in service.ask()


def test_unknown_models_are_refused(service: Service) -> None:
    """A request for another model is a 404 of the router, not of the network."""
    body = {"model": "other", "prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{service.url()}/v1/completions", json=body).status_code == 404
