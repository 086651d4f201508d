"""Errors between a model source and a prepared folder.

HubError
├── ModelNotFound      the named source does not exist
├── UnsupportedModel   the source exists, and Tandem cannot serve it
├── Offline            the source is on a hub that cannot be reached from here
├── AccessDenied       the hub is reached and requires a token, or another one
└── CacheBusy          another process is still preparing the same model
"""

from tandem.protocol.errors import TandemError


class HubError(TandemError):
    """Root of the hub's errors."""


class ModelNotFound(HubError, LookupError):
    """The source does not exist."""

    exit_status = 2


class UnsupportedModel(HubError, ValueError):
    """The source has a format that Tandem does not serve."""

    exit_status = 2


class Offline(HubError, ConnectionError):
    """The files of a hub id are not in the local cache, and the hub does not answer."""


class AccessDenied(HubError, PermissionError):
    """The repository is private or gated, and no token opens it."""


class CacheBusy(HubError, TimeoutError):
    """The lock of a cache entry was not released within the deadline."""
