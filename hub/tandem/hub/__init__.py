"""Model sources: from a user's name for a model to a folder that workers load, without torch."""

from tandem.hub.errors import (
    AccessDenied,
    CacheBusy,
    HubError,
    ModelNotFound,
    Offline,
    UnsupportedModel,
)
from tandem.hub.folder import ModelFiles
from tandem.hub.prepare import PreparedModel, prepare
from tandem.hub.source import DEFAULT_MODEL

__all__ = [
    "DEFAULT_MODEL",
    "AccessDenied",
    "CacheBusy",
    "HubError",
    "ModelFiles",
    "ModelNotFound",
    "Offline",
    "PreparedModel",
    "UnsupportedModel",
    "prepare",
]
