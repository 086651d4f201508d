"""The custom resources of ``tandem.dev/v1alpha1`` as types, without kopf or a Kubernetes client."""

from tandem.operator.api.roles import LLMRoleScalerSpec, LLMRoleScalerStatus
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus

__all__ = [
    "LLMRoleScalerSpec",
    "LLMRoleScalerStatus",
    "LLMServiceSpec",
    "LLMServiceStatus",
]
