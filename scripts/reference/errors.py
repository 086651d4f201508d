"""docs/reference/errors.md: the words for what can go wrong, from their enumerations."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from enum import Enum

from scripts.reference.table import MADE, code, table

from tandem.protocol import names
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.finish import FinishReason

_HEAD = f"""# Words for what can go wrong

{MADE}
What a client sees of it, status by status, is in [http.md](../http.md#errors); the reasons of an
LLMService's conditions are in [resource.md](../resource.md#conditions).
"""
_ENUMS: list[tuple[str, type[Enum], str]] = [
    ("Refusals of workers", RefusalCode, "Before any work was done; label `reason` of metrics."),
    ("Failed attempts", FailCause, "An attempt that had begun; the router may start another."),
    ("Ends of an answer", FinishReason, "`finish_reason` of a choice, where a client sees it."),
]


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, kind, text in _ENUMS:
        said = dict(_docs(kind))
        rows = [(code(each.value), said.get(each.name, "")) for each in kind]
        parts += [f"## {title}\n", f"{text}\n", table(("word", ""), rows)]
    rows = [
        ("0", "All is well."),
        ("1", "It could not be done; the last line says what."),
        ("2", "What was given is wrong; the last line names the word and what is allowed."),
        (str(names.EXIT_MODEL_REFUSED), "`tandem prepare`: this model will never do."),
    ]
    parts += ["## Exit statuses of commands\n", table(("status", ""), rows)]
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
