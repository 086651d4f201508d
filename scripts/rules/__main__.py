"""Check rules and panels and try every case: ``python -m scripts.rules`` (``make rules``)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from scripts.dashboards import boards
from scripts.rules import cases, chart, promtool

CHECK_SECONDS = 300


def main() -> int:
    """promtool's exit status."""
    program = promtool.build()
    with tempfile.TemporaryDirectory() as folder:
        commands = [["check", "rules", _written(Path(folder) / "panels.yaml", _panels())]]
        for number, (ground, tests) in enumerate(cases.by_ground().items()):
            rules = Path(folder) / f"rules-{number}.yaml"
            commands.append(
                ["check", "rules", _written(rules, chart.rule_file(dict(ground.settings)))]
            )
            content = cases.test_file(rules, ground, tests)
            path = Path(folder) / f"tests-{number}-{ground.every}.yaml"
            commands.append(["test", "rules", _written(path, content)])
        for command in commands:
            done = subprocess.run([str(program), *command], check=False, timeout=CHECK_SECONDS)
            if done.returncode:
                return done.returncode
    return 0


def _written(path: Path, content: dict[str, Any]) -> str:
    """The path of a file that now has this."""
    path.write_text(yaml.safe_dump(content, width=1000))
    return str(path)


def _panels() -> dict[str, Any]:
    """Expressions of the boards as if they were recorded: promtool says whether they are right."""
    texts = {boards.plain(expression) for _, expression in boards.queries()}
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(sorted(texts))]
    return {"groups": [{"name": "panels", "rules": rules}]}


if __name__ == "__main__":
    sys.exit(main())
