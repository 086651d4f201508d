"""Sandbox in which chat templates run, with the names that they expect.

Templates come with models, and some servers let clients send their own: foreign code. The sandbox
is Jinja's immutable one. The additions here give no access to a class or module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that could be Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a `self` in the signature, which would forbid namespace(self=...).
        _refuse_private(dict(*args[1:], **kwargs))
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private((name,))
        super().__setitem__(name, value)


def _refuse_private(names: Iterable[object]) -> None:
    for name in names:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace holds no name like {name!r}")


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox to compile one template in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_SafeNamespace,
        dict=_make_dict,
    )
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict. A function, so that no template gets a reference to the class."""
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
