"""Write the boards into the chart: ``python -m scripts.dashboards`` (``make dashboards``)."""

from __future__ import annotations

import sys

from scripts.dashboards.boards import BOARDS
from scripts.dashboards.grafana import text_of
from scripts.rules.chart import CHART, ROOT

FOLDER = CHART / "dashboards"


def files() -> dict[str, str]:
    """Content by name."""
    return {f"{board.name}.json": text_of(board) for board in BOARDS}


def main() -> int:
    """Write what differs, and name it."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text() != content:
            path.write_text(content)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
