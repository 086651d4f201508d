"""Write docs/reference anew: ``python -m scripts.reference`` (``make reference-pages``)."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.reference import alerts, clients, crd, errors, flags, limits, metrics, parameters

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """Content of each page by its file's name."""
    return {
        "flags.md": flags.page(),
        "metrics.md": metrics.page(),
        "llmservice.md": crd.page(ROOT / "manifests" / "crds" / "llmservices.yaml"),
        "errors.md": errors.page(),
        "alerts.md": alerts.page(),
        "clients.md": clients.page(),
        "limits.md": limits.page(),
        "parameters.md": parameters.page(),
    }


def main() -> int:
    """Write what differs, and name it."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in pages().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text() != content:
            path.write_text(content)
            print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
