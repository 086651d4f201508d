"""Settings of both kinds of worker, as sections of ``--help``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.base.listening import check_exposed, is_loopback
from tandem.base.settings import settings_of
from tandem.cli.settings.flags import Section
from tandem.engine.config import EngineConfig
from tandem.engine.config.engine import SECTIONS
from tandem.engine.config.servable import check_model
from tandem.hub.folder import ModelFiles
from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.errors import InvalidParameter
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
    """Return the secret of this user's processes on this machine, created once."""
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
    """Create the file atomically, despite other processes."""
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
        allowed = f"a secret: other users can access {path}, or it has none; remove it"
        raise InvalidParameter("kv_secret", "", allowed)
    return secret


_TITLES = {"model": "Model", "cache": "KV cache", "parallel": "Parallelism"}
_TITLES |= {"scheduler": "Scheduler", "gpu": "GPU", "profiler": "Profiles"}
_TITLES |= {"structured_outputs": "Structured output"}


def worker_sections() -> list[Section]:
    """Return the sections of server, engine and hand-off, in the order of --help."""
    return [
        Section("Server", ServerConfig),
        Section("Model files", ModelFiles),
        *engine_sections(),
        Section("KV hand-off", KVTransferConfig),
    ]


def engine_sections(leave_out: frozenset[str] = frozenset()) -> list[Section]:
    """Return the engine's settings, except ``leave_out``."""
    engine = [
        Section(_TITLES[name], settings, leave_out & _fields(settings))
        for name, settings in SECTIONS.items()
    ]
    device = frozenset(SECTIONS) | (leave_out & _fields(EngineConfig))
    return [*engine, Section("Device", EngineConfig, device)]


def _fields(settings: type) -> frozenset[str]:
    return frozenset(each.name for each in settings_of(settings))


def engine_config(given: Mapping[type, Mapping[str, Any]], **fixed: Any) -> EngineConfig:
    """Return the engine's config with ``fixed`` settings. The model may be any source of hub/.

    An unsupported model is refused before weights are fetched or converted.
    """
    flat = engine_values(given) | fixed
    source = flat.pop("model", None)
    if source is None:
        raise InvalidParameter("--model", None, "a folder, a GGUF file, a hub id or package:NAME")
    from tandem.hub import prepare
    from tandem.hub.source import has_commits, served_name

    revision = flat.pop("revision", None) if has_commits(source) else None
    weights = flat.get("load_format") != "dummy"
    prepared = prepare(
        source,
        revision=revision,
        weights=weights,
        check=lambda folder: check_model(folder, flat),
        files=ModelFiles(**given.get(ModelFiles, {})),
    )
    flat.setdefault("revision", prepared.fingerprint if weights else None)
    flat.setdefault("served_model_name", served_name(source))
    return EngineConfig.of(str(prepared.path), **flat)


def engine_values(given: Mapping[type, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the given engine settings by their flat names."""
    flat: dict[str, Any] = dict(given.get(EngineConfig, {}))
    for settings in SECTIONS.values():
        flat.update(given.get(settings, {}))
    return flat
