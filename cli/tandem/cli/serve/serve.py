"""`tandem serve`: a router and one worker that serves whole requests, without hand-off."""

from __future__ import annotations

from dataclasses import replace

from tandem.cli.serve.overrides import (
    Overrides,
    described,
    environment_of,
    of_router,
    sections_for,
    take_roles,
)
from tandem.cli.serve.stack import UpConfig
from tandem.cli.serve.up import Supervisor
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.hub.folder import ModelFiles


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    server = Section("Server", UpConfig, frozenset({"prefill", "decode"}))
    sections = [server, *sections_for(("decode",))]
    words, roles = take_roles(of_router("serve", argv, sections), ("router",))
    given = parse("serve", described(__doc__, ("router",)), sections, words)
    config = replace(UpConfig(**given[UpConfig]), prefill=0, decode=1)
    overrides = Overrides(environment=environment_of(given, UpConfig, ModelFiles), flags=roles)
    return Supervisor(config, overrides, ModelFiles(**given[ModelFiles])).run()
