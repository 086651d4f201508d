"""Values that other charts have too: as a subchart, behind a mirror, next to another release."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.manifests import load_manifests
from tests.operator.control_plane import binary

from tandem.cli.settings.flags import Section, add_flags, read_settings
from tandem.operator.settings import OperatorSettings

CHART = Path(__file__).parents[2] / "charts" / "tandem"
DIGEST = "sha256:" + "a" * 64
pytestmark = pytest.mark.skipif(binary("helm") is None, reason="helm is not there")


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(binary("helm")), *words], capture_output=True, text=True, timeout=60, check=False
    )


def rendered(values: dict[str, Any], release: str = "tandem", namespace: str = "sys") -> list[Any]:
    """Return the objects that the chart makes of values."""
    done = helm("template", release, str(CHART), "-n", namespace, *_sets(values))
    assert done.returncode == 0, done.stderr
    return load_manifests(done.stdout)


def _sets(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in ("--set-json", _json(name, value))]


def _json(name: str, value: Any) -> str:
    return f"{name}={json.dumps(value)}"


def pods(objects: list[Any]) -> dict[str, Any]:
    """Return the pod specs of the release, by kind."""
    found = {
        each["kind"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] in ("Deployment", "DaemonSet")
    }
    return found | {each["kind"]: each["spec"] for each in objects if each["kind"] == "Pod"}


def arguments(objects: list[Any]) -> list[str]:
    found: list[str] = pods(objects)["Deployment"]["containers"][0]["args"]
    return found


def test_a_parent_chart_may_switch_it_on_and_off(tmp_path: Path) -> None:
    """`condition: tandem.enabled` of a dependency is a value that the schema knows."""
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts" / "tandem").symlink_to(CHART)
    dependency = {"name": "tandem", "version": "0.1.0", "condition": "tandem.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    on = helm("template", "x", str(parent), "--set", "tandem.enabled=true,global.storageClass=a")
    assert on.returncode == 0, on.stderr
    assert "kind: Deployment" in on.stdout
    off = helm("template", "x", str(parent), "--set", "tandem.enabled=false")
    assert off.returncode == 0, off.stderr
    assert "kind: Deployment" not in off.stdout


def test_images_come_from_the_global_registry() -> None:
    """Images of the operator, its test, the node's agent and of services, whatever names them."""
    objects = rendered(
        {
            "global": {"imageRegistry": "mirror.example:5000/hub"},
            "nodeAgent": {"enabled": True},
            "routerImage": "localhost/own/router:1",
        }
    )
    images = {
        container["image"]
        for pod in pods(objects).values()
        for container in (*pod["containers"], *pod.get("initContainers", ()))
    }
    assert {image.rpartition("/")[0] for image in images} == {
        "mirror.example:5000/hub/tandem-serving"
    }
    given = arguments(objects)
    assert "--worker-image=mirror.example:5000/hub/tandem-serving/tandem-worker:0.1.0" in given
    assert "--router-image=mirror.example:5000/hub/own/router:1" in given


def test_without_a_registry_the_operator_keeps_its_default_images() -> None:
    """No argument names an image that nobody chose."""
    assert not [word for word in arguments(rendered({})) if "-image=" in word]


def test_pull_secrets_are_global_ones_and_own_ones() -> None:
    """Every pod of the release has both, global names as texts or as maps."""
    values = {
        "global": {"imagePullSecrets": ["a", {"name": "b"}]},
        "imagePullSecrets": [{"name": "c"}],
        "nodeAgent": {"enabled": True, "image": "worker:1"},
    }
    found = pods(rendered(values))
    assert set(found) == {"Deployment", "DaemonSet", "Pod"}
    for pod in found.values():
        assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}, {"name": "c"}]


def test_pull_secrets_of_services_reach_the_operator() -> None:
    """By a flag each, which its own parser takes; an operator without them gets no such flag."""
    given = arguments(rendered({"servicePullSecrets": [{"name": "a"}, {"name": "b.c"}]}))
    flags = [word for word in given if "pull-secrets" in word]
    assert flags == ["--service-pull-secrets=a", "--service-pull-secrets=b.c"]
    sections = [Section("Operator", OperatorSettings)]
    parser = argparse.ArgumentParser()
    add_flags(parser, sections)
    read = read_settings(parser.parse_args(flags), sections, {})[OperatorSettings]
    assert OperatorSettings(**read).service_pull_secrets == ("a", "b.c")
    assert not [word for word in arguments(rendered({})) if "pull-secrets" in word]
    wrong = helm("template", "x", str(CHART), "--set", "servicePullSecrets[0].name=A_B")
    assert wrong.returncode != 0
    assert "/servicePullSecrets/0/name" in wrong.stderr


def test_a_digest_wins_over_the_tag() -> None:
    """The image is the one that the digest names."""
    values = {"image": {"repository": "reg/op", "tag": "x", "digest": DIGEST}}
    assert pods(rendered(values))["Deployment"]["containers"][0]["image"] == f"reg/op@{DIGEST}"
    refused = helm("template", "x", str(CHART), "--set", "image.digest=abc")
    assert refused.returncode != 0
    assert "digest" in refused.stderr


def test_names_can_be_overridden() -> None:
    """In part, or as a whole; the Lease that the operator takes has the same name."""
    part = rendered({"nameOverride": "llm"}, release="prod")
    assert "--lease-name=prod-llm" in arguments(part)
    whole = rendered({"fullnameOverride": "serving"}, release="prod")
    (deployment,) = (each for each in whole if each["kind"] == "Deployment")
    assert deployment["metadata"]["name"] == "serving"


def test_the_operator_gets_variables_and_spread_constraints() -> None:
    """A constraint without a selector selects the operator's own pods."""
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    pod = pods(
        rendered(
            {
                "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
                "topologySpreadConstraints": [spread],
            }
        )
    )["Deployment"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in pod["containers"][0]["env"]
    (made,) = pod["topologySpreadConstraints"]
    assert made["labelSelector"]["matchLabels"]["app.kubernetes.io/name"] == "tandem-operator"
    assert {name: made[name] for name in spread} == spread


def test_helm_test_asks_at_another_port_with_a_key() -> None:
    """The key comes from a Secret, as a variable of the test's pod."""
    values = {"test": {"serviceName": "demo", "port": 9000, "apiKeySecretRef": {"name": "keys"}}}
    (container,) = pods(rendered(values))["Pod"]["containers"]
    assert "http://demo.default.svc:9000/v1/chat/completions" in container["args"][0]
    assert container["env"] == [
        {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}
    ]


def test_two_namespaces_may_have_a_release_of_one_name() -> None:
    """Objects outside namespaces carry the release's namespace in their names."""
    first, second = (rendered({}, namespace=name) for name in ("team-a", "team-b"))

    def cluster_wide(objects: list[Any]) -> set[tuple[str, str]]:
        return {
            (each["kind"], each["metadata"]["name"])
            for each in objects
            if "namespace" not in each["metadata"] and each["kind"] != "CustomResourceDefinition"
        }

    assert cluster_wide(first)
    assert not cluster_wide(first) & cluster_wide(second)


def test_a_release_needs_no_rights_outside_its_namespaces() -> None:
    """With listed namespaces, and CRDs and policies left to an administrator."""
    values = {
        "watchNamespaces": ["team-a"],
        "crds": {"install": False},
        "admissionPolicy": {"enabled": False},
        "aggregateRoles": False,
    }
    for each in rendered(values, namespace="team-a"):
        assert each["metadata"].get("namespace") == "team-a", each["kind"]


def test_a_second_release_that_watches_a_namespace_collides() -> None:
    """Both make one Role of one name there, which Helm gives to one release only."""
    roles = [
        {
            (each["metadata"]["namespace"], each["metadata"]["name"])
            for each in rendered({"watchNamespaces": watched}, release=name)
            if each["kind"] == "RoleBinding"
        }
        for name, watched in (("one", ["a", "b"]), ("two", ["b", "c"]))
    ]
    assert roles[0] & roles[1] == {("b", "tandem-operator")}
