"""Settings that both kinds of worker have, as sections of ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.cli.flags import Section
from tandem.engine.config import EngineConfig
from tandem.engine.config.engine import SECTIONS
from tandem.engine.config.servable import check_model
from tandem.hub.model_files import ModelFiles
from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.settings import settings_of
from tandem.worker.server_config import ServerConfig

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
    """Return the engine's settings, except the fields in ``leave_out``."""
    engine = [
        Section(_TITLES[name], settings, leave_out & _fields(settings))
        for name, settings in SECTIONS.items()
    ]
    device = frozenset(SECTIONS) | (leave_out & _fields(EngineConfig))
    return [*engine, Section("Device", EngineConfig, device)]


def _fields(settings: type) -> frozenset[str]:
    return frozenset(each.name for each in settings_of(settings))


def engine_config(given: Mapping[type, Mapping[str, Any]]) -> EngineConfig:
    """Return the engine's config from the given settings. The model may be any source of hub/.

    An unsupported model is refused before weights are fetched or converted.
    """
    flat = engine_values(given)
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
    """Return what was given of the engine's settings, by their flat names."""
    flat: dict[str, Any] = dict(given.get(EngineConfig, {}))
    for settings in SECTIONS.values():
        flat.update(given.get(settings, {}))
    return flat
