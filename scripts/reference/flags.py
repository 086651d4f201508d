"""docs/reference/flags.md: every setting of every command, from its config class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts.reference.table import MADE, code, table

from tandem.base.settings import Setting
from tandem.cli.bench.load import LoadConfig
from tandem.cli.bench.serve import ServeConfig
from tandem.cli.bench.throughput import ThroughputConfig
from tandem.cli.prepare import PrepareConfig
from tandem.cli.serve.node_agent import NOT_HERE
from tandem.cli.serve.stack import UpConfig
from tandem.cli.settings.flags import Section, flag_of, plain_type
from tandem.cli.settings.logs import LogConfig
from tandem.cli.settings.worker_settings import worker_sections
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.operator.settings import OperatorSettings
from tandem.prefill.config import PrefillConfig
from tandem.protocol.names import ENV_PREFIX
from tandem.router.config import RouterConfig

_HEAD = f"""# Flags and variables

{MADE}
Set `--some-flag` also as `{ENV_PREFIX}SOME_FLAG` in the environment, or as `some_flag` in the YAML
file of `--config`. A flag has precedence over the environment, and the environment over the file.
`tandem up` and `tandem serve` take the flags of workers for all workers, or as `--prefill.FLAG`,
`--decode.FLAG` and `--router.FLAG` for one role. Repeat the flag of a list; use commas elsewhere.

`tandem chat`, `top`, `explain`, `run-batch` and `bench kernels` have only flags: see `--help`.
"""


def groups() -> list[tuple[str, Sequence[Section]]]:
    """Headings with the sections under them, as --help of the commands has them."""
    return [
        ("`tandem up`, `tandem serve`", [Section("Stack", UpConfig)]),
        (
            "Workers: `tandem prefill`, `tandem decode`",
            [*worker_sections(), Section("Prefill workers alone", PrefillConfig)],
        ),
        (
            "`tandem router`",
            [Section("Router", RouterConfig), Section("Logging", LogConfig)],
        ),
        (
            "`tandem node-agent`",
            [Section("Node agent", NodeAgentConfig), Section("Logging", LogConfig, NOT_HERE)],
        ),
        (
            "`tandem operator`",
            [Section("Operator", OperatorSettings), Section("Logging", LogConfig)],
        ),
        ("`tandem prepare`", [Section("Prepare", PrepareConfig)]),
        (
            "`tandem bench`",
            [
                Section("serve", ServeConfig),
                Section("Load of serve and throughput", LoadConfig),
                Section("throughput", ThroughputConfig),
            ],
        ),
    ]


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, sections in groups():
        parts.append(f"## {title}\n")
        for section in sections:
            if len(sections) > 1:
                parts.append(f"### {section.title}\n")
            parts.append(table(("flag", "type", "default", "effect"), _rows(section)))
    return "\n".join(parts)


def _rows(section: Section) -> Iterator[tuple[str, str, str, str]]:
    for each in section.flags():
        text = each.help + (f" Unit: {each.unit}." if each.unit else "")
        yield code(flag_of(each.name)), _kind(each), code(_default(each)), text


def _kind(each: Setting) -> str:
    if each.choices:
        return ", ".join(map(code, each.choices))
    names: dict[Any, str] = {int: "integer", float: "number", bool: "switch", tuple: "list"}
    return names.get(plain_type(each.type), "text")


def _default(each: Setting) -> str:
    if each.required or each.default in (None, "", ()):
        return ""
    return str(each.default).lower() if isinstance(each.default, bool) else str(each.default)
