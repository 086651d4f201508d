"""Grammars by outlines-core: an expression becomes an index of states over the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.engine.structured.backends.followed import (
    LEAF_SHAPES,
    check_kind,
    schema_of,
    unanchored,
)
from tandem.engine.structured.errors import GrammarError
from tandem.protocol.structured import StructuredOutputsParams

_SHAPES = (
    "type properties required additionalProperties",
    "type additionalProperties minProperties maxProperties",
    "type items minItems maxItems",
    "type prefixItems",
    *LEAF_SHAPES,
)


def prepared(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the form as the library reads it. Raises GrammarError."""
    check_kind(wanted, "outlines", ("choice", "regex", "json"))
    if wanted.kind == "choice":
        return StructuredOutputsParams(regex="|".join(map(re.escape, wanted.choice or ())))
    if wanted.kind == "regex":
        return StructuredOutputsParams(regex=unanchored(wanted.regex or ""))
    schema = schema_of(wanted, "outlines", _SHAPES, has_any=False)
    return msgspec.structs.replace(wanted, json=schema, json_object=None)


class OutlinesMatcher:
    """Matcher over a guide."""

    def __init__(self, index: Any, tokens: tuple[int, ...] = ()) -> None:
        from outlines_core import Guide

        self._index = index
        self._tokens: tuple[int, ...] = ()
        self._guide = Guide(index)
        self.accept(tokens)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            try:
                self._guide.advance(token, return_tokens=False)
            except ValueError as error:
                raise GrammarError(str(error)) from error
        self._tokens += (*token_ids,)

    def fill(self, words: memoryview) -> None:
        mask = np.zeros(len(words) // 4 + 1, np.int32)
        self._guide.write_mask_into(mask.ctypes.data, mask.size, mask.itemsize)
        words[:] = mask.tobytes()[: len(words)]

    @property
    def is_accepting(self) -> bool:
        return bool(self._guide.is_finished())

    def copy(self) -> OutlinesMatcher:
        return OutlinesMatcher(self._index, self._tokens)


class OutlinesBackend:
    """Library of one vocabulary."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        from outlines_core import Vocabulary

        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(tokens):
            if text:
                ids.setdefault(text, []).append(token)
        self._vocabulary = Vocabulary(len(tokens), ids)

    def compile(self, wanted: StructuredOutputsParams) -> OutlinesMatcher:
        from outlines_core import Index
        from outlines_core.json_schema import build_regex_from_schema

        regex = wanted.regex
        if regex is None:
            blanks = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
            regex = build_regex_from_schema(wanted.json or "", blanks)
        # The library takes the first alternative that matches: without \z it hides longer ones.
        return OutlinesMatcher(Index(rf"(?:{regex})\z", self._vocabulary))
