"""What fetches or reads a model gets where it runs: keys of a registry, a node, room, a way out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.operator.test_children import facts, pods

from tandem.operator.api.status import LLMServiceStatus, ModelStatus
from tandem.operator.decide import plan
from tandem.operator.decide.modelcheck import judge
from tandem.operator.decide.observe import Snapshot
from tandem.operator.desired.capability import unsupported
from tandem.operator.desired.compose import base
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import job_revision
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.protect import TemplateConflict
from tandem.operator.desired.workload import rendered, stored_template
from tandem.protocol.names import PROBE_PORT

HUB: dict[str, Any] = {"model__source": {"type": "Hub", "hub": {"repository": "a/b"}}}
CACHED = {**HUB, "model__cache": {"persistentVolumeClaim": {"claimName": "models"}}}
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
ON: Manifest = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
NONE = {"name": "no_proxy", "value": ".svc:1"}
LESS = {"limits": {"cpu": "1", "memory": "1Gi"}}
PLACED: Manifest = {
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [GPU],
    "nodeSelector": {"disk": "local"},
    "affinity": {"nodeAffinity": ON, "podAffinity": {"x": []}},
}


def job_pod(**changes: Any) -> Manifest:
    job = model_job(facts(**changes))
    assert job is not None
    pod: Manifest = job["spec"]["template"]["spec"]
    return pod


def made_of(**changes: Any) -> str:
    """The name of what the model's Job is made of."""
    given = facts(**changes)
    return job_revision(given.spec, given.settings)


def policy(given: Facts, name: str) -> Manifest:
    policies = {
        each["metadata"]["name"]: each for each in base(given) if each["kind"] == "NetworkPolicy"
    }
    said: Manifest = policies[name]["spec"]
    return said


def ports(name: str, **changes: Any) -> list[int]:
    """Ports that pods of a policy may reach anywhere."""
    return opened(facts(**changes), name)


def opened(given: Facts, name: str) -> list[int]:
    rules = policy(given, name)["egress"]
    return [each["port"] for rule in rules if "to" not in rule for each in rule["ports"]]


def variables(container: Manifest) -> list[Manifest]:
    """What was given to a container beside what is ours."""
    return [each for each in container["env"] if each in (PROXY, NONE)]


def test_the_job_goes_where_the_workers_go():
    """Secrets of a registry, nodes and taints are those of the workers that answer; it is not bound
    to other pods, which may wait for it."""
    pod = job_pod(**CACHED, decode__podTemplate={"spec": PLACED})
    expected = {**PLACED, "affinity": {"nodeAffinity": ON}}
    assert {name: pod.get(name) for name in PLACED} == expected
    assert not PLACED.keys() & job_pod(**CACHED, prefill__podTemplate={"spec": PLACED}).keys()
    pooled = job_pod(**CACHED, task="Embed", prefill__podTemplate={"spec": PLACED})
    assert pooled["tolerations"] == [GPU]


@pytest.mark.parametrize("changes", [HUB, CACHED, {}])
def test_what_fetches_says_what_it_needs(changes: dict[str, Any]):
    """In a namespace with a quota nothing is made that does not."""
    found = [
        each
        for pod in pods(**changes)
        for each in [*pod["containers"], *pod.get("initContainers", ())]
        if each["name"] == "fetch"
    ]
    assert found
    for container in found:
        needs = container["resources"]
        assert set(needs["requests"]) == set(needs["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize("changes", [CACHED, {}])
def test_the_jobs_container_is_spoken_of_by_its_name(changes: dict[str, Any]):
    """By the podTemplate of the workers that answer, in whose pods it is not."""
    said = {"name": "fetch", "image": "mirror/worker", "resources": LESS}
    other = {"name": "other", "image": "x"}
    template = {"spec": {"initContainers": [other, said]}}
    (container,) = job_pod(**changes, decode__podTemplate=template)["containers"]
    assert container["image"] == "mirror/worker"
    assert container["resources"]["limits"] == LESS["limits"]
    made = rendered(facts(**changes, decode__podTemplate=template), Role.DECODE)
    assert [each["name"] for each in made["spec"]["initContainers"]] == ["other"]


@pytest.mark.parametrize(
    ("role", "item", "said"),
    [
        (Role.DECODE, {"args": ["x"]}, r"decode.*\[fetch\].args"),
        (Role.DECODE, {"env": [{"name": "X", "value": "1"}]}, r"\[fetch\].env.*proxies"),
        (Role.PREFILL, {"resources": LESS}, "uses spec.decode.podTemplate"),
        (Role.ROUTER, {"resources": LESS}, "uses spec.decode.podTemplate"),
    ],
)
def test_what_the_job_cannot_be_told_is_refused(role: Role, item: Manifest, said: str):
    """By name; and whatever is refused, the Job that is there keeps its name."""
    template = {"spec": {"initContainers": [{"name": "fetch", **item}]}}
    given = facts(**CACHED, **{f"{role}__podTemplate": template})
    with pytest.raises(TemplateConflict, match=said):
        rendered(given, role)
    assert plan.accepted(given)[1] == "PodTemplateConflict"
    assert model_job(given) is not None


def test_a_model_is_fetched_through_the_workers_proxy():
    """The variables that main gets, by Job or in pods; those of others are not let through."""
    secret = {"name": "X", "value": "1"}
    main = {"name": "main", "env": [PROXY, secret, NONE]}
    template = {"spec": {"containers": [main]}}
    (container,) = job_pod(**CACHED, decode__podTemplate=template)["containers"]
    assert variables(container) == [PROXY, NONE]
    assert secret not in container["env"]
    made = rendered(facts(**HUB, decode__podTemplate=template), Role.DECODE)["spec"]
    assert variables(made["initContainers"][0]) == [PROXY, NONE]
    own = {"name": "fetch", "env": [{**PROXY, "value": "http://other:1"}]}
    both = {"spec": {"containers": [main], "initContainers": [own]}}
    made = rendered(facts(**HUB, decode__podTemplate=both), Role.DECODE)["spec"]
    assert own["env"][0] in made["initContainers"][0]["env"]


def test_the_way_to_hub_and_proxy_is_open():
    """Whatever their ports; to nobody who does not fetch."""
    hub = {"repository": "a/b", "endpoint": "https://mirror:8443"}
    template = {"spec": {"containers": [{"name": "main", "env": [PROXY, NONE]}]}}
    changes: dict[str, Any] = {
        "model__source": {"type": "Hub", "hub": hub},
        "decode__podTemplate": template,
    }
    cached = {**CACHED, **changes}
    assert ports("demo-model", **cached) == [53, 53, 443, 80, 3128, 8443]
    assert ports("demo-decode", **cached) == [53, 53]
    assert ports("demo-decode", **changes) == [53, 53, 443, 80, 3128, 8443]
    assert ports("demo-prefill", **changes) == [53, 53, 443, 80, 8443]
    assert ports("demo-router", **changes) == [53, 53, 443, 6443, 443, 80, 8443]


def test_a_revision_that_is_kept_keeps_its_ways():
    """Pods of the revision that serves may have to be made again under a spec that fetches nothing,
    sends its spans elsewhere and has another port of metrics."""
    hub = {"repository": "a/b", "endpoint": "https://mirror:8443"}
    template = {"spec": {"containers": [{"name": "main", "env": [PROXY, NONE]}]}}
    old = facts(
        model__source={"type": "Hub", "hub": hub},
        decode__podTemplate=template,
        observability={"tracing": {"endpoint": "http://spans:4317"}},
    )
    kept = {role: [rendered(old, role)] for role in Role}
    assert base(msgspec.structs.replace(old, kept=kept)) == base(old)
    now = facts(observability={"metrics": {"port": 9001}})
    assert set(opened(now, "demo-decode")) == {53}
    both = msgspec.structs.replace(now, kept=kept)
    assert set(opened(both, "demo-decode")) == {53, 443, 80, 3128, 8443, 4317}
    assert set(opened(both, "demo-router")) == {53, 443, 6443, 80, 8443, 4317}
    scraped = policy(both, "demo-decode")["ingress"][-1]["ports"]
    assert [each["port"] for each in scraped] == [9001, PROBE_PORT]


def test_what_is_stored_is_what_is_kept():
    old = facts(**HUB)
    revision, template = old.revision(Role.DECODE), rendered(old, Role.DECODE)
    stored = stored_template(old, Role.DECODE, revision, template)
    live = Snapshot({"ControllerRevision": {"x": stored}})
    seen = plan.see(old.owner, 2, facts().spec, LLMServiceStatus(), live)
    model = judge(seen.spec, None, ModelStatus(), None)
    made = plan.facts(seen, old.settings, 1, model, may_have_job=True)
    assert made.kept == {Role.PREFILL: [], Role.DECODE: [template], Role.ROUTER: []}


@pytest.mark.parametrize("endpoint", ["https://mirror:99999", "http://mirror:x"])
def test_a_hub_that_cannot_be_reached_is_refused(endpoint: str):
    hub = {"repository": "a/b", "endpoint": endpoint}
    given = facts(model__source={"type": "Hub", "hub": hub})
    said = unsupported(given.spec)
    assert said is not None
    assert said.startswith(f"spec.model.source.hub.endpoint: {endpoint} is not")
    assert base(given)


def test_what_a_job_is_made_of_has_a_name():
    """It changes with what the Job takes of the spec, and with nothing else."""
    before = made_of(**CACHED)
    main = {"spec": {"containers": [{"name": "main", "env": [PROXY]}]}}
    fetch = {"spec": {"initContainers": [{"name": "fetch", "resources": LESS}]}}
    changed = [
        made_of(**CACHED, decode__podTemplate=template)
        for template in ({"spec": PLACED}, main, fetch)
    ]
    assert len({before, *changed}) == 4
    other: dict[str, Any] = {"metadata": {"labels": {"a": "b"}}}
    for field in ("decode__podTemplate", "prefill__podTemplate"):
        assert made_of(**CACHED, **{field: other}) == before
