"""What `tandem explain service` says an operator would do is what the operator then does, and
nothing was written by asking."""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.builders import service
from tests.operator.harness import Harness, Operators, services
from tests.operator.test_judging import verdict

from tandem.cli.inspect.explain_service import LABEL, drawn, operator_settings, resource_of
from tandem.operator.api.status import Reason
from tandem.operator.cluster import ClusterError
from tandem.operator.probes.canary import Question
from tandem.operator.probes.probing import Asked, Key
from tandem.operator.rehearse import rehearsal
from tandem.operator.rehearse.rehearsal import Rehearsal, ToldProbes, rehearse
from tandem.operator.rehearse.stage import Stage
from tandem.operator.settings import OperatorSettings
from tandem.protocol.errors import InvalidParameter, TandemError

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
Resource = dict[str, Any]
KINDS = ("ConfigMap", "ControllerRevision", "Deployment", "Job", "LLMService", "Secret", "Service")


@pytest.fixture
def harness(lone: Harness, operators: Operators) -> Harness:
    """A namespace with an operator of its own, whose settings are known and which may be ended."""
    operators.start("one")
    return lone


def asked(harness: Harness, changed: Resource | None = None, name: str = "demo") -> Rehearsal:
    stage = Stage(kubeconfig=harness.plane.kubeconfig())
    settings = OperatorSettings(own_namespace=harness.namespace)
    return rehearse(stage, settings, harness.namespace, name, changed)


def versions(harness: Harness) -> dict[tuple[str, str], tuple[str, str]]:
    """UID and version of all objects that a look might write; status, which others write too, is no
    part of it where there is one."""
    found = {}
    for kind in KINDS:
        for each in harness.cluster.items(kind, harness.namespace):
            metadata = each["metadata"]
            version = str(metadata.get("generation") or metadata["resourceVersion"])
            found[(kind, metadata["name"])] = (metadata["uid"], version)
    return found


def test_a_changed_file_is_what_the_operator_then_does(harness: Harness):
    """At rest it would do nothing. For a changed file: which revision comes, and in what its pods
    differ; then it is applied, and comes. Nothing is written by asking."""
    harness.create()
    harness.ready()
    harness.wait(lambda: harness.condition("Progressing")[0] == "False")
    harness.wait(lambda: harness.condition("KVFabricReady")[0] == "True")
    before = versions(harness)
    found = asked(harness)
    assert found.changes == []
    assert "would make no change" in drawn(found, None)
    assert versions(harness) == before
    changed = service(engine__maxNumSeqs=7)
    found = asked(harness, changed)
    assert versions(harness) == before
    assert [(each.path, each.after) for each in found.spec] == [("spec.engine", '{"maxNumSeqs":7}')]
    assert [each.role for each in found.revisions] == ["prefill", "decode"]
    new = found.revisions[1]
    assert any("7" in (each.after or "") for each in new.differences), new.differences
    made = {(each.kind, each.name) for each in found.changes if each.verb == "create"}
    text = drawn(found, "new.yaml")
    assert f"New revision of decode: {new.before} -> {new.after}" in text
    assert "as new.yaml would change it" in text
    assert "Progressing: False" in text
    harness.change({"spec": changed["spec"]})
    harness.wait(lambda: made <= versions(harness).keys())


def test_a_service_that_is_not_there_would_be_made_whole(harness: Harness):
    """All its children, though neither its accounts nor its UID exist yet."""
    found = asked(harness, service("fresh"), "fresh")
    assert not found.exists
    kinds = {each.kind for each in found.changes}
    assert {"Deployment", "ConfigMap", "Secret", "ServiceAccount", "Service"} <= kinds
    assert {each.verb for each in found.changes} == {"create"}
    assert {each.role for each in found.revisions} == {"decode", "prefill", "router"}
    accepted = [each for each in found.after.conditions if each.type == "Accepted"]
    assert [each.status for each in accepted] == ["True"], accepted
    assert harness.names("LLMService") == set()
    assert "which does not exist" in drawn(found, "fresh.yaml")


def test_what_a_file_may_not_say_is_told_in_the_api_servers_words(lone: Harness):
    """A rule of the CRD; another resource; a service that is nowhere."""
    lone.create()
    with pytest.raises(ClusterError, match="replicas"):
        asked(lone, service(decode__replicas=-1))
    with pytest.raises(InvalidParameter, match=r"metadata\.name"):
        asked(lone, service("other"))
    with pytest.raises(TandemError, match="no LLMService absent"):
        asked(lone, name="absent")


def test_the_operators_own_flags_count(lone: Harness):
    """From its Deployment: an image that it names is that of new pods."""
    pod = {
        "containers": [
            {
                "name": "operator",
                "image": "x",
                "command": ["tandem"],
                "args": ["operator", "--worker-image=w:7", "--log-level=info"],
                "env": [{"name": "TANDEM_ROUTER_IMAGE", "value": "r:8"}],
            }
        ]
    }
    labels = {"app.kubernetes.io/name": "tandem-operator"}
    manifest: Resource = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "op", "namespace": lone.namespace, "labels": labels},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    lone.cluster.create(manifest)
    for where in (f"{lone.namespace}/op", lone.namespace):
        settings = operator_settings(lone.cluster, where)
        assert (settings.worker_image, settings.router_image) == ("w:7", "r:8")
        assert settings.own_namespace == lone.namespace
    assert operator_settings(lone.cluster, "none") == OperatorSettings()
    for wrong in ("default", "/op", f"{lone.namespace}/", f"{lone.namespace}/absent"):
        with pytest.raises(InvalidParameter, match="--operator"):
            operator_settings(lone.cluster, wrong)
    manifest["metadata"]["name"] = "second"
    lone.cluster.create(manifest)
    with pytest.raises(InvalidParameter, match="select one"):
        operator_settings(lone.cluster, lone.namespace)


def test_each_way_to_install_labels_the_operator_alike():
    """So that its Deployment is found by its namespace alone, as `tandem explain service` does."""
    name, _, value = LABEL.partition("=")
    helpers = (ROOT / "charts/tandem/templates/_helpers.tpl").read_text()
    assert f'define "tandem.selector" -}}}}\n{name}: {value}\n' in helpers
    made = yaml.safe_load((ROOT / "manifests/operator/kustomization.yaml").read_text())
    assert made["labels"][0]["pairs"][name] == value


def test_the_resource_is_found_among_documents(tmp_path: Path):
    """By kind and name; a file without it is refused by name."""
    path = tmp_path / "all.yaml"
    path.write_text("kind: Secret\n---\n" + json.dumps(service("a")) + "\n---\n# nothing\n")
    assert resource_of(path, "a") == service("a")
    for text in ("kind: [", "just: words", json.dumps(service("b"))):
        path.write_text(text)
        with pytest.raises(InvalidParameter, match="--filename"):
            resource_of(path, "a")
    with pytest.raises(InvalidParameter, match="--filename"):
        resource_of(tmp_path / "absent", "a")


class Prompt(ToldProbes):
    """Whoever is asked has answered before the look that asks goes on, and rightly."""

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        for name in about:
            good = verdict(name, Reason.CANARY_OK, "came back")
            self.known(key).asked[name] = Asked(verdict=good)
        return None


def test_without_an_operator_it_is_told_what_one_would_do(
    harness: Harness, operators: Operators, monkeypatch: pytest.MonkeyPatch
):
    """An edit by hand: the field, what stands there, what it would be. And no service is ready
    before its rollout knows: a canary that is answered while a look goes on counts for the next
    one. A service that says Ready would lose what serves when its spec changes."""
    harness.create()
    harness.ready()
    for each in operators.running:
        each.stop()
    harness.edit("ConfigMap", "demo-peers", {"data": {"x": "y"}})
    found = asked(harness)
    (change,) = [each for each in found.changes if each.kind == "ConfigMap"]
    assert (change.verb, change.name) == ("update", "demo-peers")
    assert [(each.path, each.before, each.after) for each in change.differences] == [
        ("data.x", "y", None)
    ]
    assert "data.x: y -> (nothing)" in drawn(found, None)
    forgotten = {"status": {"rollout": None, "conditions": None}}
    path = f"{services(harness.namespace)}/demo/status"
    harness.plane.send("PATCH", path, forgotten)
    monkeypatch.setattr(rehearsal, "ToldProbes", Prompt)
    told = asked(harness).after
    assert told.rollout.targets
    assert not told.rollout.stable
    ready = {each.type: each.status for each in told.conditions}
    assert (ready["Ready"], ready["Servable"]) == ("False", "Unknown")
