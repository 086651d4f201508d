"""docs/reference/errors.md: the words for what can go wrong, from their enumerations."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from enum import Enum

from scripts.reference.table import MADE, code, table

from tandem.protocol import names
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.outputs import FinishReason

_HEAD = f"""# Errors and reasons

{MADE}
Statuses of HTTP are in [Errors](../http.md#errors), and reasons of an LLMService's conditions in
[Reasons](../resource.md#reasons).
"""
_ENUMS: list[tuple[str, type[Enum], str]] = [
    (
        "Refusals of workers",
        RefusalCode,
        "A worker refuses a request before any work; label `reason` of metrics.",
    ),
    ("Failed attempts", FailCause, "A begun attempt failed; the router may start another."),
    ("Ends of an answer", FinishReason, "`finish_reason` of a choice."),
]


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, kind, text in _ENUMS:
        said = dict(_docs(kind))
        rows = [(code(each.value), said.get(each.name, "")) for each in kind]
        parts += [f"## {title}\n", f"{text}\n", table(("word", "meaning"), rows)]
    rows = [
        ("0", "Success."),
        ("1", "The command failed; the last line has the reason."),
        ("2", "The arguments are wrong; the last line names the argument and what is allowed."),
        (str(names.EXIT_MODEL_REFUSED), "`tandem prepare`: the model is not supported."),
    ]
    parts += ["## Exit statuses of commands\n", table(("status", "meaning"), rows)]
    return "\n".join(parts)


def _docs(kind: type[Enum]) -> Iterator[tuple[str, str]]:
    """Names of members with the docstring below each."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    for line, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.Assign) and isinstance(below, ast.Expr):
            target, value = line.targets[0], below.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                yield target.id, str(value.value)
