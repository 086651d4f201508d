"""Measure the size of the code base and compare it with house.toml: ``python -m scripts.house``.

A figure above its limit fails. The commit that raises a limit says what the lines buy.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "house.toml"
FLAGS = ROOT / "docs" / "reference" / "flags.md"
HELP_WORDS = 25
BANNED = frozenset({
    "As", "At", "By", "For", "From", "How", "In", "Of", "To", "What", "Where", "Whether", "Who",
    "With",
})  # fmt: skip
"""First words that a docstring may not have."""


def main() -> int:
    """Print each figure next to its limit; return 1 if one is above it."""
    limits: dict[str, int] = tomllib.loads(LIMITS.read_text())["at_most"]
    found = figures()
    print(f"{'':28}{'now':>9}{'at most':>9}")
    for name, value in found.items():
        mark = "  above its limit" if value > limits[name] else ""
        print(f"{name.replace('_', ' '):28}{value:9,}{limits[name]:9,}{mark}")
    return int(any(value > limits[name] for name, value in found.items()))


def figures() -> dict[str, int]:
    """Return each figure by its name in house.toml."""
    product = [path for folder in sorted(ROOT.glob("*/tandem")) for path in folder.rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in product}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    tools = [path for name in ("bench", "scripts") for path in (ROOT / name).rglob("*.py")]
    return {
        "product_lines": sum(map(lines, product)),
        "product_files": len(product),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "tests_lines": sum(map(lines, (ROOT / "tests").rglob("*.py"))),
        "bench_lines": sum(map(lines, (ROOT / "bench").rglob("*.py"))),
        "flags": len(re.findall(r"^\| `--", FLAGS.read_text(), re.MULTILINE)),
        "long_helps": sum(len(text.split()) > HELP_WORDS for text in helps()),
        "banned_docstrings": sum(map(is_banned, nodes))
        + sum(is_banned(node) for path in tools for node in ast.walk(ast.parse(path.read_text()))),
        "modules_in_circles": len(in_circles(imports_of(trees))),
    }


def helps() -> Iterator[str]:
    """Yield the help of each flag, without its unit."""
    for row in FLAGS.read_text().splitlines():
        if row.startswith("| `--"):
            yield row.rstrip("| ").rpartition("| ")[2].partition(" Unit: ")[0]


def lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return path.read_text().count("\n")


def is_banned(node: ast.AST) -> bool:
    """Return whether a node has a docstring that begins with a banned word."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    words = (ast.get_docstring(node) or "").split()
    return bool(words) and words[0] in BANNED


def imports_of(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the product modules that each product module imports, at any depth of its code."""
    named = {module_name(path): tree for path, tree in trees.items()}
    return {name: set(imported(tree, named.keys())) - {name} for name, tree in named.items()}


def module_name(path: Path) -> str:
    """Return ``tandem.engine.request`` for engine/tandem/engine/request.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Yield the known modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = [f"{node.module}.{each.name}" for each in node.names]
            yield from (
                each if each in known else node.module
                for each in submodules
                if each in known or node.module in known
            )


def in_circles(graph: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that import themselves through others."""
    return {name for name in graph if name in reachable(graph, name)}


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the modules that ``start`` imports, directly or through others."""
    seen: set[str] = set()
    left = [*graph[start]]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    return seen


if __name__ == "__main__":
    sys.exit(main())
