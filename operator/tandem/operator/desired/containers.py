"""Common parts of all containers of a service."""

from __future__ import annotations

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired import model as models
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest
from tandem.operator.desired.policy import is_restricted
from tandem.operator.settings import OperatorSettings
from tandem.protocol import names


def labelled(spec: LLMServiceSpec, child: Manifest) -> Manifest:
    """Return a child with the spec's labels and annotations below its own."""
    metadata = dict(child["metadata"])
    for field, given in (("labels", spec.labels), ("annotations", spec.annotations)):
        if given:
            metadata[field] = {**given, **metadata.get(field, {})}
    return {**child, "metadata": metadata}


def with_extras(spec: LLMServiceSpec, settings: OperatorSettings, template: Manifest) -> Manifest:
    """Return a pod's template with the spec's labels, annotations and pull secrets.

    Its own labels and pull secrets have precedence, but the spec's annotations.
    """
    metadata, pod = template["metadata"], dict(template["spec"])
    metadata = {
        **metadata,
        "labels": {**spec.labels, **metadata["labels"]},
        "annotations": {**metadata["annotations"], **spec.annotations},
    }
    if (secrets := pull_secrets(spec, settings)) and "imagePullSecrets" not in pod:
        pod["imagePullSecrets"] = secrets
    return {**template, "metadata": metadata, "spec": pod}


def pull_secrets(spec: LLMServiceSpec, settings: OperatorSettings) -> list[Manifest]:
    """Return the pull secrets of the spec, else of the operator."""
    named = [each.name for each in spec.image_pull_secrets]
    return [{"name": name} for name in named or settings.service_pull_secrets]


_TEMPORARY = "tandem-tmp"


def worker_image(spec: LLMServiceSpec, facts: Facts) -> str:
    """Return the image of workers."""
    return spec.image or facts.settings.worker_image


def container_extras(facts: Facts) -> Manifest:
    """Return the fields of every container."""
    extras: Manifest = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    if facts.settings.image_pull_policy:
        extras["imagePullPolicy"] = facts.settings.image_pull_policy
    if is_restricted(facts.spec):
        extras["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    return extras


def scratch_env() -> dict[str, str]:
    """Return variables that keep all writes in scratch folders."""
    return {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        names.ENV_CACHE: names.PATH_CACHE,
    }


def scratch_volumes() -> list[Manifest]:
    """Return the volumes of ``scratch_env``."""
    return [{"name": _TEMPORARY, "emptyDir": {}}, {"name": models.CACHE_VOLUME, "emptyDir": {}}]


def scratch_mounts() -> list[Manifest]:
    """Return the mounts of ``scratch_volumes``."""
    return [{"name": _TEMPORARY, "mountPath": "/tmp"}, models.cache_mount()]
