"""What every command with settings does first: parse, merge, set up logging."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from tandem.cli.flags import Section, add_flags, environment, read_settings


def parse(
    command: str, description: str, sections: Sequence[Section], argv: list[str]
) -> dict[type, dict[str, Any]]:
    """Given values per settings class. Exits 0 after --help, 2 on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog=f"tandem {command}",
        description=description,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=100),
    )
    add_flags(parser, sections)
    return read_settings(parser.parse_args(argv), sections, environment())


def set_up_logging(level: str) -> None:
    """One line a message, to standard error."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
