"""docs/reference/limits.md: limits and timings that files change, from their classes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields

from scripts.reference.table import MADE, code, table

from tandem.operator.settings import Timings
from tandem.router.limits import Limits

_HEAD = f"""# Limits

{MADE}
## Router

`--limits-file FILE` reads other values from a YAML file, for example `max_body_bytes: 67108864`.
A status is the answer to a request beyond the limit. gRPC has [the same limits](../grpc.md#limits).
"""
_OPERATOR = """## Operator

`tandem operator --timings-file FILE` reads other values from a YAML file, for example
`canary_seconds: 30`.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, _table(Limits), _OPERATOR, _table(Timings)])


def _table(config: type) -> str:
    docs = dict(_docs(config))
    rows = [
        (code(each.name), _default(each.name, each.default), docs[each.name])
        for each in fields(config)
    ]
    return table(("limit", "default", "meaning"), rows)


def _docs(config: type) -> Iterator[tuple[str, str]]:
    """Yield each field with the docstring below it."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    for line, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
            target, value = line.target, below.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                yield target.id, str(value.value)


def _default(name: str, value: object) -> str:
    """Return a default with its unit."""
    if isinstance(value, float):
        return f"{value:g} s"
    assert isinstance(value, int)
    if name.endswith("_bytes") and value >= 1 << 20:
        return f"{value >> 20} MiB"
    return f"{value >> 10} KiB" if name.endswith("_bytes") else f"{value:,}"
