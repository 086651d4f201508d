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
        rules = Path(folder) / "rules.yaml"
        rules.write_text(yaml.safe_dump(chart.rule_file(), width=1000))
        panels = Path(folder) / "panels.yaml"
        panels.write_text(yaml.safe_dump(_panels(), width=1000))
        commands = [["check", "rules", str(path)] for path in (rules, panels)]
        for every, content in cases.test_files(rules).items():
            path = Path(folder) / f"tests-{every}.yaml"
            path.write_text(yaml.safe_dump(content, width=1000))
            commands.append(["test", "rules", str(path)])
        for command in commands:
            done = subprocess.run([str(program), *command], check=False, timeout=CHECK_SECONDS)
            if done.returncode:
                return done.returncode
    return 0


def _panels() -> dict[str, Any]:
    """Expressions of the boards as if they were recorded: promtool says whether they are right."""
    texts = {boards.plain(expression) for _, expression in boards.queries()}
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(sorted(texts))]
    return {"groups": [{"name": "panels", "rules": rules}]}


if __name__ == "__main__":
    sys.exit(main())
