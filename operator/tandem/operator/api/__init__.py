"""The custom resources as types: LLMService and LLMRoleScaler of ``tandem.dev/v1alpha1``.

Needs neither kopf nor a Kubernetes client, so that the command line, the manifests and tests can
import it. CRD manifests are generated from here (``crd``).
"""

from tandem.operator.api.roles import LLMRoleScalerSpec, LLMRoleScalerStatus
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus

__all__ = [
    "LLMRoleScalerSpec",
    "LLMRoleScalerStatus",
    "LLMServiceSpec",
    "LLMServiceStatus",
]
