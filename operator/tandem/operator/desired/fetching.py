"""The container that fetches or reads the model, and its podTemplate.

It is an init container, or the model's Job's. The podTemplate of the answering workers configures
the latter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.values import digest
from tandem.operator.desired import model as models
from tandem.operator.desired.containers import (
    container_extras,
    pull_secrets,
    scratch_env,
    scratch_mounts,
    worker_image,
)
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.merge import MAIN, merged
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.policy import answering_role, worker_role
from tandem.operator.desired.protect import PROXIES, TemplateConflict, check_fetch
from tandem.operator.settings import OperatorSettings

FETCH = "fetch"
"""Name of the container that fetches or reads the model."""
_INITS = "initContainers"
_RESOURCES: Manifest = {
    "requests": {"cpu": "100m", "memory": "512Mi"},
    "limits": {"cpu": "4", "memory": "16Gi"},
}
"""Default resources, which quotas require."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


def template_of(spec: LLMServiceSpec, role: Role) -> Manifest:
    """Return a role's podTemplate, or {}."""
    part = spec.router if role is Role.ROUTER else worker_role(spec, role)
    return part.pod_template or {}


def fetch_container(facts: Facts, role: Role) -> Manifest:
    """Return the container for ``role`` with its proxies, before its podTemplate is merged."""
    spec, where = facts.spec, facts.delivery
    env = [{"name": name, "value": value} for name, value in scratch_env().items()]
    env += models.prepare_env(spec.model)
    env += _proxies(_named(template_of(spec, role), "containers", MAIN))
    return {
        "name": FETCH,
        "image": worker_image(spec, facts),
        "command": ["tandem"],
        "args": models.prepare_arguments(spec.model, where, facts.pinned),
        "env": env,
        "volumeMounts": [
            *scratch_mounts(),
            *models.mounts(where, fetching=where.source is not None),
        ],
        "resources": _RESOURCES,
        **container_extras(facts),
    }


def job_container(facts: Facts) -> Manifest:
    """Return the container with the podTemplate of the answering workers. Raises TemplateConflict,
    TemplateUnreadable.
    """
    role = answering_role(facts.spec)
    own = fetch_container(facts, role)
    items = _fetch_items(template_of(facts.spec, role))
    place = f"spec.{role}.podTemplate.spec.{_INITS}"
    now: list[Manifest] = merged([own], items, path=place)
    check_fetch(own, {_INITS: now}, place)
    return next(each for each in now if each.get("name") == FETCH)


def without_job(facts: Facts, role: Role, template: Manifest) -> Manifest:
    """Return a podTemplate without its entry of the Job's container.

    Raises TemplateConflict if the entry is wrong, or of another role.
    """
    if not _fetch_items(template):
        return template
    answering = answering_role(facts.spec)
    if role is not answering:
        field = f"spec.{role}.podTemplate.spec.{_INITS}[{FETCH}]"
        reason = f"a Job fetches the model; it uses spec.{answering}.podTemplate"
        raise TemplateConflict(field, reason)
    job_container(facts)
    spec = template["spec"]
    rest = [each for each in spec[_INITS] if not _is(each, FETCH)]
    return {**template, "spec": {**spec, _INITS: rest}}


def job_pod(spec: LLMServiceSpec, settings: OperatorSettings) -> Manifest:
    """Return placement and pull secrets of the Job's pod, as of the answering workers.

    Affinity to other pods is omitted: they may wait for this one.
    """
    pod_spec = template_of(spec, answering_role(spec)).get("spec")
    given = pod_spec if isinstance(pod_spec, dict) else {}
    base = {"imagePullSecrets": pull_secrets(spec, settings), "tolerations": []}
    pod: Manifest = {
        name: merged(own, given[name], path=name)
        if isinstance(given.get(name), list) and given[name]
        else own
        for name, own in base.items()
    }
    pod = {name: items for name, items in pod.items() if items or given.get(name)}
    if given.get("nodeSelector"):
        pod["nodeSelector"] = given["nodeSelector"]
    affinity = given.get("affinity")
    if isinstance(affinity, dict) and affinity.get("nodeAffinity"):
        pod["affinity"] = {"nodeAffinity": affinity["nodeAffinity"]}
    return pod


def job_revision(spec: LLMServiceSpec, settings: OperatorSettings) -> str:
    """Return the name of all parts of a Job's pod except the model.

    A failed Job is made again when it changes.
    """
    template = template_of(spec, answering_role(spec))
    main = _named(template, "containers", MAIN)
    return digest([spec.image, job_pod(spec, settings), _fetch_items(template), _proxies(main)])


def fetch_ports(spec: LLMServiceSpec, role: Role) -> list[int]:
    """Return the ports that the container must reach: web, hub, and proxy."""
    hub, template = spec.model.source.hub, template_of(spec, role)
    urls = [hub.endpoint] if hub is not None and hub.endpoint is not None else []
    for item in (_named(template, "containers", MAIN), _named(template, _INITS, FETCH)):
        urls += [str(each.get("value") or "") for each in _proxies(item) if _is_way(each)]
    return _web_ports(urls)


def kept_fetch_ports(template: Manifest) -> list[int]:
    """Return the same ports of an existing template; none if its pods do not fetch."""
    item = _named(template, _INITS, FETCH)
    if not item:
        return []
    ways = [each for each in _proxies(item) if _is_way(each)]
    hub = [each for each in item.get("env", ()) if each["name"] == models.ENV_HUB]
    return _web_ports(str(each.get("value") or "") for each in (*ways, *hub))


def _web_ports(urls: Iterable[str]) -> list[int]:
    found = {port for url in urls if (port := port_of(url)) is not None}
    return [443, 80, *sorted(found - {443, 80})]


def port_of(url: str) -> int | None:
    """Return the port of a URL, or None."""
    try:
        parsed = urlsplit(url)
        return parsed.port or _DEFAULT_PORTS.get(parsed.scheme)
    except ValueError:
        return None


def unusable_hub(spec: LLMServiceSpec) -> str | None:
    """Return the hub's endpoint if it cannot be reached."""
    hub = spec.model.source.hub
    endpoint = None if hub is None else hub.endpoint
    return endpoint if endpoint is not None and port_of(endpoint) is None else None


def _items(template: Manifest, field: str) -> list[Any]:
    spec = template.get("spec")
    found = spec.get(field) if isinstance(spec, dict) else None
    return found if isinstance(found, list) else []


def _is(item: Any, name: str) -> bool:
    return isinstance(item, dict) and item.get("name") == name


def _fetch_items(template: Manifest) -> list[Manifest]:
    return [each for each in _items(template, _INITS) if _is(each, FETCH)]


def _named(template: Manifest, field: str, name: str) -> Manifest:
    return next((each for each in _items(template, field) if _is(each, name)), {})


def _proxies(container: Manifest) -> list[Manifest]:
    """Return the proxy variables of a container."""
    env = container.get("env")
    items = env if isinstance(env, list) else []
    return [each for each in items if isinstance(each, dict) and each.get("name") in PROXIES]


def _is_way(variable: Manifest) -> bool:
    return not str(variable["name"]).lower().startswith("no_")
