"""LLMRoleScaler: the /scale of one role, for HPA and KEDA; made by the operator, never by hand."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from tandem.operator.api.values import Api, DnsLabel, Replicas, doc


class ScaledRole(StrEnum):
    """Roles that can be scaled from outside."""

    PREFILL = "Prefill"
    DECODE = "Decode"


class LLMRoleScalerSpec(Api, frozen=True, kw_only=True):
    """Which role, and how many replicas it shall have."""

    service_name: Annotated[DnsLabel, doc("LLMService whose role is scaled.")]
    role: Annotated[ScaledRole, doc("Prefill or Decode.")]
    replicas: Annotated[
        Replicas, doc("Replicas of the role, within the bounds that the service sets.")
    ]


class LLMRoleScalerStatus(Api, frozen=True, kw_only=True):
    """Status that /scale shows."""

    replicas: Annotated[Replicas | None, doc("Replicas that are there.")] = None
    selector: Annotated[
        str | None, doc("Label selector of the role's pods, for the autoscaler's metrics.")
    ] = None
    observed_replicas: Annotated[
        Replicas | None, doc("Replicas that were asked for when the operator last looked.")
    ] = None
