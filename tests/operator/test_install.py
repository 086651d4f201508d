"""What users install: chart, kustomize manifests and samples, against the real API server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.manifests import load_manifests
from tests.operator.control_plane import ControlPlane, binary
from tests.operator.test_children import facts

from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import LogConfig
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.operator.api.service import spec_of
from tandem.operator.decide import plan
from tandem.operator.desired.pod import USER

ROOT = Path(__file__).parents[2]
CHART = "charts/tandem"
NEEDS_HELM = pytest.mark.skipif(binary("helm") is None, reason="helm is not there")
RIGHTS = ("rbac", "aggregate")
SAMPLES = sorted(path.name for path in (ROOT / "manifests/samples").glob("*.yaml"))


def helm(*arguments: str) -> str:
    done = subprocess.run(
        [str(binary("helm")), *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    return done.stdout + done.stderr


def rules(objects: list[dict[str, Any]]) -> list[Any]:
    """Rules of all Roles and ClusterRoles, in an order of their own."""
    found = [
        (sorted(rule["apiGroups"]), sorted(rule["resources"]), sorted(rule["verbs"]))
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
        for rule in each["rules"]
    ]
    return sorted(found)


@NEEDS_HELM
def test_the_chart_is_clean():
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


@NEEDS_HELM
def test_chart_and_manifests_grant_the_same():
    """The two ways to install give the operator the same rights, and nobody `*`."""
    folder = ROOT / "manifests/operator"
    plain = load_manifests("\n---\n".join((folder / f"{name}.yaml").read_text() for name in RIGHTS))
    chart = load_manifests(helm("template", "tandem", CHART, "-n", "tandem-system"))
    listed = helm("template", "tandem", CHART, "--set", "watchNamespaces={a}")
    assert rules(chart) == rules(plain) == rules(load_manifests(listed))
    assert "*" not in str(rules(plain))
    wide = [each for each in load_manifests(listed) if each["kind"].startswith("ClusterRole")]
    assert [each["metadata"]["name"] for each in wide] == [
        "tandem-default-view",
        "tandem-default-edit",
    ]


@NEEDS_HELM
def test_chart_and_manifests_hold_the_operator_to_the_same():
    """The two ways to install have the same admission policies, names and labels aside."""
    plain = load_manifests((ROOT / "manifests/operator/admission.yaml").read_text())
    text = helm("template", "tandem-operator", CHART, "-n", "tandem-system")
    text = text.replace("tandem-operator-tandem-system-", "tandem-operator-")
    chart = [
        each for each in load_manifests(text) if each["kind"].startswith("ValidatingAdmission")
    ]
    for each in chart:
        each["metadata"].pop("labels")
    assert sorted(map(repr, chart)) == sorted(map(repr, plain))


@NEEDS_HELM
def test_what_a_switch_opens_is_opened_in_both_places():
    """The operator's own check and the API server's go together; the other one stays."""
    sets = ("--set", "admissionPolicy.allowPrivilegedPods=true")
    text = helm("template", "tandem", CHART, *sets)
    assert "--allow-privileged-pods" in text
    assert "--allow-any-secret" not in text
    assert "must not mount hostPath" not in text
    assert "volumes of an LLMService must not use Secrets" in text
    assert "kind: ValidatingAdmissionPolicy" not in helm(
        "template", "tandem", CHART, "--set", "admissionPolicy.enabled=false"
    )


@pytest.mark.full
@NEEDS_HELM
@pytest.mark.parametrize(
    ("endpoint", "protocol", "port"),
    [
        ("http://collector.monitoring:4317", "grpc", 4317),
        ("https://collector.example/v1/traces", "http/protobuf", 443),
        ("http://collector", "grpc", 80),
        ("http://[fd00::1]:4318/v1/traces", "http/protobuf", 4318),
    ],
)
def test_an_endpoint_for_spans_is_told_and_may_be_reached(endpoint: str, protocol: str, port: int):
    """By flags of the operator and its NetworkPolicy; without one there is neither."""
    sets = f"tracing.endpoint={endpoint},tracing.protocol={protocol}"
    objects = load_manifests(helm("template", "tandem", CHART, "--set", sets))
    deployment = next(each for each in objects if each["kind"] == "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    spans = [each for each in args if "traces" in each]
    assert spans == [f"--otlp-traces-endpoint={endpoint}"]
    env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [each for each in env if each["name"].startswith("OTEL_")] == [
        {"name": "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "value": protocol},
        {"name": "OTEL_TRACES_SAMPLER_ARG", "value": "1"},
    ]
    policy = next(each for each in objects if each["kind"] == "NetworkPolicy")
    assert {"ports": [{"protocol": "TCP", "port": port}]} in policy["spec"]["egress"]
    without = load_manifests(helm("template", "tandem", CHART))
    fenced = next(each for each in without if each["kind"] == "NetworkPolicy")
    assert len(fenced["spec"]["egress"]) == len(policy["spec"]["egress"]) - 1
    assert "traces" not in str(next(each for each in without if each["kind"] == "Deployment"))


@NEEDS_HELM
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("tracing.endpoint=collector:4317", "/tracing/endpoint"),
        (
            "tracing.endpoint=http://collector:4318/v1/traces",
            "tracing.endpoint: by grpc it has no path",
        ),
        ("tracing.sampleRatio=2", "/tracing/sampleRatio"),
        ("replicas=0", "/replicas"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("replica=2", "replica"),
        ("metrics.podMonitor.interval=often", "/metrics/podMonitor/interval"),
        ("nodeAgent.hostPath=here", "/nodeAgent/hostPath"),
        ("nodeAgent.claims[0].name=a", "/nodeAgent/claims/0"),
        ("nodeAgent.claims={a,a}", "/nodeAgent/claims': items at 0 and 1 are equal"),
        ("nodeAgent.metricsPort=80", "/nodeAgent/metricsPort"),
        ("nodeAgent.enable=true", "enable"),
    ],
)
def test_wrong_values_are_refused(value: str, said: str):
    """The schema names a wrong value before anything is installed."""
    text = helm("template", "tandem", CHART, "--set", value)
    assert said in text
    assert "Error" in text


AGENT = "nodeAgent.enabled=true,workerImage=worker:1"


@NEEDS_HELM
def test_a_nodes_agent_is_installed_where_it_is_asked_for():
    """Off by default. It has no rights, no capability, no network but a port for who scrapes, and a
    user that is no worker's; its folder is the one that claims show."""
    assert "node-agent" not in helm("template", "tandem", CHART)
    assert "nodeAgent.image: name" in helm(
        "template", "tandem", CHART, "--set", "nodeAgent.enabled=true"
    )
    claims = "nodeAgent.claims[0].namespace=llm,nodeAgent.claims[0].name=node"
    text = helm("template", "tandem", CHART, "-n", "sys", "--set", f"{AGENT},{claims}")
    found = {
        each["kind"]: each
        for each in load_manifests(text)
        if "node-agent" in str(each["metadata"].get("labels"))
    }
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    (first,), (agent,) = pod["initContainers"], pod["containers"]
    assert "install -d -m 0750 -o 65533 -g 65532 /run/tandem/node/agent\n" in first["args"][0]
    seen = next(each for each in agent["volumeMounts"] if each["name"] == "node")
    assert (seen["mountPath"], seen["subPath"]) == ("/run/tandem/node/agent", "agent")
    refused = [
        each for each in load_manifests(text) if "user 65533 is reserved" in str(each.get("spec"))
    ]
    assert len(refused) == 2, "for pods of services, and for every pod that mounts a claim"
    assert "in ['llm/node']" in str(refused)
    assert agent["image"] == first["image"] == "worker:1"
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert agent["securityContext"]["runAsUser"] == 65533 != USER
    assert f"--agent-group={USER}" in agent["args"]
    assert pod["automountServiceAccountToken"] is False
    assert not pod["hostNetwork"]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [scraped_from("sys", 8080)]
    assert policy["egress"] == []
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    path = "/var/lib/tandem/node"
    assert next(each for each in pod["volumes"] if "hostPath" in each)["hostPath"]["path"] == path
    volume, claim = found["PersistentVolume"], found["PersistentVolumeClaim"]
    assert volume["spec"]["hostPath"]["path"] == path
    assert volume["spec"]["claimRef"] == {"namespace": "llm", "name": "node"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["metadata"]["namespace"] == "llm"
    words = agent["args"]
    given = parse(
        "node-agent", "", [Section("", NodeAgentConfig), Section("", LogConfig)], words[1:]
    )
    assert given[NodeAgentConfig] == {
        "kv_node_folder": "/run/tandem/node/agent",
        "agent_group": USER,
        "host": "::",
        "probe_port": 8080,
    }
    (port,) = agent["ports"]
    assert port == {"name": "http-metrics", "containerPort": 8080}


def scraped_from(namespace: str, port: int) -> dict[str, Any]:
    """The one way in of a NetworkPolicy."""
    labels = {"kubernetes.io/metadata.name": namespace}
    return {
        "from": [{"namespaceSelector": {"matchLabels": labels}}],
        "ports": [{"protocol": "TCP", "port": port}],
    }


@NEEDS_HELM
def test_a_nodes_agent_shows_its_series_to_who_scrapes():
    """At the port that is said, to the namespace that is said, by a monitor of its own; or not at
    all, and then it has no network."""
    sets = f"{AGENT},metrics.podMonitor.enabled=true,metrics.namespace=monitoring"

    def rendered(port: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        text = helm(
            *("template", "tandem", CHART, "-n", "sys"),
            *("--set", f"{sets},nodeAgent.metricsPort={port}"),
        )
        mine = [each for each in load_manifests(text) if "node-agent" in each["metadata"]["name"]]
        by_kind = {each["kind"]: each for each in mine}
        monitors = [each for each in mine if each["kind"] == "PodMonitor"]
        return by_kind["DaemonSet"]["spec"]["template"], by_kind["NetworkPolicy"]["spec"], monitors

    pod, policy, (monitor,) = rendered(9400)
    (agent,) = pod["spec"]["containers"]
    assert "--probe-port=9400" in agent["args"]
    assert policy["ingress"] == [scraped_from("monitoring", 9400)]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == agent["ports"][0]["name"]
    assert agent["ports"][0]["containerPort"] == 9400
    pod, policy, monitors = rendered(0)
    (agent,) = pod["spec"]["containers"]
    assert not any("probe-port" in each for each in agent["args"])
    assert "ports" not in agent
    assert (policy["ingress"], policy["egress"]) == ([], [])
    assert not monitors


@NEEDS_HELM
def test_crds_stay_when_the_release_goes():
    """Uninstalling the release deletes no service."""
    crds = [
        each
        for each in load_manifests(helm("template", "tandem", CHART))
        if each["kind"] == "CustomResourceDefinition"
    ]
    assert len(crds) == 2
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in crds} == {"keep"}


@pytest.mark.full
@NEEDS_HELM
def test_the_api_server_takes_the_chart(plane: ControlPlane, namespace: str):
    """Every object of the chart passes the real API server, strictly, pods under the restricted
    profile too."""
    claims = f"nodeAgent.claims[0].namespace={namespace},nodeAgent.claims[0].name=node"
    sets = ("--set", f"crds.install=false,{AGENT},{claims}")
    text = helm("template", "tandem", CHART, "-n", namespace, *sets)
    said = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
    )
    assert "deployment.apps/tandem serverside-applied" in said
    assert "would violate" not in said


@pytest.mark.full
def test_the_api_server_takes_the_manifests(plane: ControlPlane):
    """`kubectl apply -k manifests` is valid as a whole."""
    said = plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", "manifests"
    )
    assert "deployment.apps/tandem-operator serverside-applied" in said


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLES)
def test_the_api_server_takes_a_sample(plane: ControlPlane, name: str):
    """Every sample is valid against the CRDs, without an unknown field."""
    kinds = {
        each["kind"] for each in load_manifests((ROOT / "manifests/samples" / name).read_text())
    }
    said = plane.kubectl(
        "-n", "default", "apply", "--dry-run=server", "--validate=strict",
        "-f", f"manifests/samples/{name}",
    )  # fmt: skip
    assert ("llmservice.tandem.dev/" in said) is ("LLMService" in kinds)
    assert said.count("(server dry run)") >= len(kinds)


@pytest.mark.parametrize("name", SAMPLES)
def test_this_version_can_do_what_a_sample_asks_for(name: str):
    """No sample is accepted by the API server and refused by the operator."""
    for each in load_manifests((ROOT / "manifests/samples" / name).read_text()):
        if each["kind"] == "LLMService":
            given = msgspec.structs.replace(facts(), spec=spec_of(each))
            assert plan.accepted(given)[0] == "True"


@pytest.mark.full
@NEEDS_HELM
def test_a_release_comes_changes_and_goes(plane: ControlPlane, namespace: str):
    """`helm install`, `upgrade` and `uninstall` on a real API server; the CRDs, and with them all
    services, outlive the release."""
    where = ("-n", namespace, "--kubeconfig", str(plane.kubeconfig()))
    adopt = ("--take-ownership", "--force-conflicts", "--set", "crds.adopt=true")
    said = helm("install", "tandem", CHART, *where, *adopt)
    assert "To serve a model" in said, said
    crd = plane.kubectl("get", "crd", "llmservices.tandem.dev", "-o", "yaml")
    assert "helm.sh/resource-policy: keep" in crd
    assert "tandem" in plane.kubectl("-n", namespace, "get", "lease", "-o", "name")
    assert "STATUS: deployed" in helm("upgrade", "tandem", CHART, *where, "--set", "replicas=1")
    path = "jsonpath={.spec.replicas}"
    assert plane.kubectl("-n", namespace, "get", "deploy", "tandem", "-o", path) == "1"
    assert "uninstalled" in helm("uninstall", "tandem", *where)
    assert "No resources found" in plane.kubectl("-n", namespace, "get", "deploy", check=False)
    assert "llmservices" in plane.kubectl("get", "crd", "-o", "name")
    left = plane.kubectl("-n", namespace, "get", "lease", check=False)
    assert "No resources found" in left, "the Lease went with the release"


@pytest.mark.full
@NEEDS_HELM
def test_releases_and_kubectl_do_not_fight_for_the_crds(plane: ControlPlane, namespace: str):
    """A second release leaves the CRDs to the first one, and so does kubectl."""
    where = ("-n", namespace, "--kubeconfig", str(plane.kubeconfig()))
    own = ("--set", f"watchNamespaces={{{namespace}}}")
    other = ("--set", "watchNamespaces={default}")
    apply = ("apply", "--server-side", "-k", "manifests/crds")
    plane.kubectl(*apply, "--force-conflicts")
    adopt = ("--take-ownership", "--force-conflicts", "--set", "crds.adopt=true")
    assert "STATUS: deployed" in helm("install", "first", CHART, *where, *own, *adopt)
    owner = "jsonpath={.metadata.annotations.meta\\.helm\\.sh/release-name}"
    crd = ("get", "crd", "llmservices.tandem.dev", "-o", owner)
    assert plane.kubectl(*crd) == "first"
    said = helm("install", "second", CHART, *where, *other)
    assert "STATUS: deployed" in said, said
    assert "belong to another release" in said
    assert plane.kubectl(*crd) == "first"
    assert "serverside-applied" in plane.kubectl(*apply)
    for release, watched in (("second", other), ("first", own)):
        assert "STATUS: deployed" in helm("upgrade", release, CHART, *where, *watched)
    for release in ("second", "first"):
        assert "uninstalled" in helm("uninstall", release, *where)
    assert "llmservices" in plane.kubectl("get", "crd", "-o", "name")


@pytest.mark.full
@NEEDS_HELM
def test_two_releases_do_not_watch_one_namespace(plane: ControlPlane, namespace: str):
    """Helm refuses the second one and names the release that was first."""
    where = ("-n", namespace, "--kubeconfig", str(plane.kubeconfig()))
    kept = ("--set", "crds.install=false")
    watched = ("--set", f"watchNamespaces={{{namespace}}}")
    assert "STATUS: deployed" in helm("install", "first", CHART, *where, *watched, *kept)
    said = helm("install", "second", CHART, *where, *watched, *kept)
    assert 'Role "tandem-operator"' in said
    assert 'current value is "first"' in said
    assert "uninstalled" in helm("uninstall", "first", *where)


class Asked(BaseHTTPRequestHandler):
    """Answers one chat completion; keeps what was asked."""

    answer = "Paris."
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        text = json.dumps({"choices": [{"message": {"content": self.answer}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


@pytest.mark.full
@NEEDS_HELM
@pytest.mark.parametrize(("answer", "status"), [("Paris.", 0), (" ", 1)])
def test_helm_test_asks_a_question(plane: ControlPlane, namespace: str, answer: str, status: int):
    """The hook's pod passes the restricted profile; what it runs asks the named service's router
    for the named model, and fails without an answer."""
    chosen = "test.serviceName=smollm2,test.serviceNamespace=models,test.model=smol"
    text = helm("template", "tandem", CHART, "-n", namespace, "--set", chosen)
    (pod,) = [each for each in load_manifests(text) if each["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    dry = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    assert "serverside-applied" in plane.kubectl(*dry, stdin=json.dumps(pod))
    script, there = pod["spec"]["containers"][0]["args"][0], "http://smollm2.models.svc:8000/"
    assert there in script
    Asked.answer, bodies = answer, Asked.bodies
    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        here = f"http://127.0.0.1:{server.server_address[1]}/"
        command = [sys.executable, "-c", script.replace(there, here)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == status, done.stderr
    assert (bodies[-1]["model"], bodies[-1]["temperature"]) == ("smol", 0)
    assert "capital of France" in bodies[-1]["messages"][0]["content"]
