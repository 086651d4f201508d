"""`tandem serve`: a router and one worker that does both halves, without hand-off."""

from __future__ import annotations

from dataclasses import replace

from tandem.cli.command import parse
from tandem.cli.flags import Section
from tandem.cli.up import Supervisor
from tandem.cli.up_config import UpConfig


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    section = Section("Server", UpConfig, frozenset({"prefill", "decode", "prefill_flags"}))
    given = parse("serve", __doc__.splitlines()[0], [section], argv)
    return Supervisor(replace(UpConfig(**given[UpConfig]), prefill=0, decode=1)).run()
