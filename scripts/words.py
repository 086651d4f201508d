"""Count words of README.md and docs/ that the style rules forbid: ``python -m scripts.words``.

Each group has a limit in house.toml, per 1,000 words of prose. Code does not count. With ``--show``
each place is printed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "house.toml"
GROUPS = {
    "say": "say says said saying tell tells told telling hear hears heard",
    "who": "who",
    "persons": "whoever whom somebody nobody anybody everybody",
    "archaic": "anew beside wherein thereof whereas amid unto",
    "wants": "wants",
}
"""Words of each group. Data is sent, received or logged; requests are not persons."""

_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)


def main() -> int:
    """Print each group next to its limit; return 1 if one is above it."""
    limits: dict[str, float] = tomllib.loads(LIMITS.read_text())["words_per_1000"]
    texts = {path: prose(path) for path in pages()}
    total = sum(len(re.findall(r"\S*\w\S*", text)) for text in texts.values())
    print(f"{'words of docs':28}{total:9,}")
    failed = False
    for name in GROUPS:
        found = [each for path, text in texts.items() for each in places(path, text, name)]
        rate = 1000 * len(found) / total
        failed |= rate > limits[name]
        mark = "  above its limit" if rate > limits[name] else ""
        print(f"{name + ' per 1,000':28}{rate:9.2f}{limits[name]:9.2f}{mark}")
        if mark or "--show" in sys.argv:
            print("\n".join(found))
    return int(failed)


def pages() -> list[Path]:
    """Return README.md and each page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(path: Path) -> str:
    """Return the text of a page, with spaces in the place of code and link targets."""
    return _CODE.sub(lambda found: re.sub(r"\S", " ", found[0]), path.read_text())


def places(path: Path, text: str, group: str) -> Iterator[str]:
    """Yield ``page:line: word`` of each word of a group."""
    words = re.compile(rf"\b(?:{'|'.join(GROUPS[group].split())})\b", re.IGNORECASE)
    for number, line in enumerate(text.splitlines(), 1):
        for found in words.finditer(line):
            yield f"{path.relative_to(ROOT)}:{number}: {found[0]}"


if __name__ == "__main__":
    sys.exit(main())
