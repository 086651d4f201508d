"""Grammars by xgrammar: automata of the vocabulary, and a stack for nesting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.engine.structured.backends.followed import (
    LEAF_SHAPES,
    check_kind,
    schema_of,
)
from tandem.engine.structured.errors import GrammarError
from tandem.protocol.structured import StructuredOutputsParams

_SHAPES = (
    "type properties required additionalProperties minProperties maxProperties",
    "type items prefixItems minItems maxItems",
    "type minimum maximum exclusiveMinimum exclusiveMaximum",
    *LEAF_SHAPES,
)


def prepared(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the form as the library reads it. Raises GrammarError."""
    check_kind(wanted, "xgrammar", ("choice", "regex", "json", "json_object", "grammar"))
    if wanted.kind == "choice":
        texts = " | ".join(map(json.dumps, wanted.choice or ()))
        return StructuredOutputsParams(grammar=f"root ::= {texts}")
    if wanted.json is None and not wanted.json_object:
        return wanted
    if wanted.whitespace_pattern is not None:
        raise GrammarError("without whitespace_pattern, which xgrammar does not support")
    schema = schema_of(wanted, "xgrammar", _SHAPES)
    return msgspec.structs.replace(wanted, json=schema, json_object=None)


class XGrammarMatcher:
    """Implements Matcher."""

    def __init__(self, matcher: Any, size: int) -> None:
        """``size``: bytes of a mask of the library."""
        self._matcher = matcher
        self._words = size

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not self._matcher.accept_token(token):
                raise GrammarError(f"another token than {token}, which is not allowed here")

    def fill(self, words: memoryview) -> None:
        mask = np.zeros((1, self._words), np.int32)
        self._matcher.fill_next_token_bitmask(mask)
        words[:] = mask.tobytes()[: len(words)]

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork(), self._words)


class XGrammarBackend:
    """Library of one vocabulary."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        import xgrammar

        self._words = len(tokens) // 32 + 1
        info = xgrammar.TokenizerInfo([*tokens, b""], stop_token_ids=[len(tokens)])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, wanted: StructuredOutputsParams) -> XGrammarMatcher:
        import xgrammar

        compiler = self._compiler
        match wanted.kind:
            case "regex":
                compiled = compiler.compile_regex(wanted.regex)
            case "grammar":
                text = wanted.grammar or ""
                ebnf = "::=" in text
                compiled = compiler.compile_grammar(text) if ebnf else compiler.compile_lark(text)
            case _:
                compiled = compiler.compile_json_schema(
                    wanted.json, any_whitespace=not wanted.disable_any_whitespace
                )
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._words)
