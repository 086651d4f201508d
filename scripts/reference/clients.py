"""The page of clients: who was seen to do what, by which test, in which version."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from scripts.reference.table import table

FOLDER = Path(__file__).parents[2] / "tests" / "clients"
SHOWN = FOLDER / "shown.json"
"""What `make clients` has seen when it last ran through."""
FEATURES = (
    *("chat", "stream", "usage", "tools", "structured output", "logprobs", "embeddings"),
    *("responses", "messages", "errors", "cancel", "batch"),
)
TITLE = "# Clients known to work\n"
TEXT = """
`make clients` runs unmodified packages against a router, a prefill and a decode worker with
SmolLM2-135M. A cell links the test that shows the feature. – means that the client does not have
it, or that no test shows it. [The suite](../../tests/clients/README.md) describes each column.
Agents (Codex CLI, Claude Code, opencode, OpenAI's Agents SDK) use a worker that follows a script.
"""
MADE = "Made by `make reference-pages` from the results of `make clients`.\n"


def pins() -> dict[str, str]:
    """The version of each client, where it is asked for."""
    groups = tomllib.loads((FOLDER / "pyproject.toml").read_text())["dependency-groups"]
    wanted = [each for group in groups.values() for each in group if "==" in each]
    found = dict(re.sub(r"\[.*?\]", "", each).split("==") for each in wanted)
    node = FOLDER / "node" / "package.json"
    if node.is_file():
        asked = json.loads(node.read_text())["dependencies"]
        found |= {f"{name} (npm)": version for name, version in asked.items()}
    go = FOLDER / "go" / "go.mod"
    if go.is_file():
        found |= dict(re.findall(r"require \S+/([\w-]+)/v\d+ v(\S+)", go.read_text()))
    rust = FOLDER / "rust" / "Cargo.toml"
    if rust.is_file():
        asked = tomllib.loads(rust.read_text())["dependencies"]
        found["async-openai"] = asked["async-openai"]["version"].lstrip("=")
    return found


def page() -> str:
    """The page's text."""
    rows = []
    for client, what in json.loads(SHOWN.read_text()).items():
        shown = what["shown"]
        cells = [_cell(shown.get(feature, [])) for feature in FEATURES]
        rows.append([f"{client} {pins()[client]}", *cells])
    return f"{TITLE}\n{MADE}{TEXT}\n{table(['client', *FEATURES], rows)}"


def _cell(tests: list[str]) -> str:
    names = [each.partition("::") for each in tests]
    links = [f"[yes](../../tests/clients/suite/{file} '{test}')" for file, _, test in names]
    return ", ".join(links[:1]) or "–"
