"""`tandem router`: an OpenAI HTTP server over running workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.cli.serve.own_server import loading
from tandem.cli.serve.stack_dump import dump_on_signal
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section, environment
from tandem.cli.settings.logs import LogConfig, set_up_logging
from tandem.hub.folder import ModelFiles
from tandem.protocol.names import ENV_CANARY_TOKEN_FILE
from tandem.router.config import RouterConfig
from tandem.router.limits import with_limits


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    sections = router_sections()
    given: dict[type, dict[str, Any]] = parse("router", __doc__.splitlines()[0], sections, argv)
    log = LogConfig(**given[LogConfig])
    set_up_logging(log.log_level, log.log_format)
    dump_on_signal()
    with loading():
        from tandem.router.app import serve

    serve(prepared_config(given), log_level=log.log_level)
    return 0


def router_sections() -> list[Section]:
    """Return the settings of the command, in the order of --help."""
    return [
        Section("Router", RouterConfig),
        Section("Model files", ModelFiles),
        Section("Logging", LogConfig),
    ]


def prepared_config(given: Mapping[type, Mapping[str, Any]]) -> RouterConfig:
    """Return the router's config, with the model prepared without weights.

    A folder is used unchanged: the router's image has no hub.
    """
    environ = environment()
    config = RouterConfig(
        **with_limits(given[RouterConfig], environ),
        canary_token_file=environ.get(ENV_CANARY_TOKEN_FILE),
    )
    files = ModelFiles(**given[ModelFiles])
    if not config.model or (Path(config.model).is_dir() and not files):
        return config
    from tandem.hub import prepare
    from tandem.hub.source import served_name

    prepared = prepare(config.model, weights=False, files=files)
    names = config.served_model_name or (served_name(config.model),)
    return replace(config, model=str(prepared.path), served_model_name=names)
