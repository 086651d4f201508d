"""Settings of the hand-off from a command line, and the secret that authorizes peers.

With CURVE, keys identify a peer. Without it, a secret does: the given one, or on the loopback one
that this user's processes share through a private file. A default must not be computable.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.exposure import check_exposed, is_loopback
from tandem.worker.server_config import ServerConfig

SECRET_BYTES = 32


def handoff_config(given: dict[type, dict[str, Any]], server: ServerConfig) -> KVTransferConfig:
    """Return the config with its secret. Raises InvalidParameter for an exposed port."""
    config = KVTransferConfig(**given[KVTransferConfig])
    host, curve = config.kv_control_host, server.has_curve
    plain = server.allow_plaintext
    check_exposed("kv_control_host", host, curve=curve, allow_plaintext=plain)
    if config.kv_secret or curve:
        return config
    if not is_loopback(host):
        allowed = "a secret that all workers of the service share, as there are no CURVE keys"
        raise InvalidParameter("kv_secret", config.kv_secret, allowed)
    return replace(config, kv_secret=own_secret())


def own_secret() -> str:
    """Return the secret that only this user's processes on this machine know; created once."""
    from tandem.hub.cache import cache_root

    path = cache_root() / f"kv-secret-{os.geteuid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make(path)
        return _read(path)
    except OSError as error:
        allowed = f"a secret, as none can be kept in {path} ({error.strerror})"
        raise InvalidParameter("kv_secret", "", allowed) from error


def _make(path: Path) -> None:
    """Create the file atomically, also if other processes create it at the same time."""
    if path.exists():
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
        os.link(partial, path)
    except FileExistsError:
        pass  # another process was first, and its secret counts
    finally:
        partial.unlink()


def _read(path: Path) -> str:
    with path.open() as file:
        state = os.fstat(file.fileno())
        secret = file.read().strip()
    if state.st_uid != os.geteuid() or state.st_mode & 0o077 or len(secret) < SECRET_BYTES:
        allowed = f"a secret, as {path} is not this user's alone, or holds none; remove it"
        raise InvalidParameter("kv_secret", "", allowed)
    return secret
