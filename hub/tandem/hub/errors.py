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
    """Root of this portion's errors; the text names the remedy."""


class ModelNotFound(HubError, LookupError):
    """The source names no folder, file, package or repository that exists."""

    exit_status = 2


class UnsupportedModel(HubError, ValueError):
    """The source was read and its format is not one that Tandem serves; names both."""

    exit_status = 2


class Offline(HubError, ConnectionError):
    """A hub id was given, its files are not in the local cache, and the hub does not answer."""


class AccessDenied(HubError, PermissionError):
    """The repository is private or gated, and no token that opens it was found."""


class CacheBusy(HubError, TimeoutError):
    """The lock on a cache entry was not released within the deadline."""
