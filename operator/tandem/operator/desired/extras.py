"""Labels, annotations and pull secrets that a spec gives to all children and pods.

Tandem's own labels always win. Pure; called by ``compose``, ``pod``, ``job`` and ``secrets``.
"""

from __future__ import annotations

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.naming import Manifest
from tandem.operator.settings import OperatorSettings


def labelled(spec: LLMServiceSpec, child: Manifest) -> Manifest:
    """Return a child with the spec's labels and annotations below its own."""
    metadata = dict(child["metadata"])
    for field, given in (("labels", spec.labels), ("annotations", spec.annotations)):
        if given:
            metadata[field] = {**given, **metadata.get(field, {})}
    return {**child, "metadata": metadata}


def with_extras(spec: LLMServiceSpec, settings: OperatorSettings, template: Manifest) -> Manifest:
    """Return a pod's template with the spec's labels below its own, the spec's annotations above
    its own, and pull secrets unless it has some."""
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
    """Return the Secrets for the images of a service's pods: the spec's, else the operator's."""
    named = [each.name for each in spec.image_pull_secrets]
    return [{"name": name} for name in named or settings.service_pull_secrets]
