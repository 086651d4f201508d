"""Grammars by lm-format-enforcer: characters are followed in Python, over a trie of tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.engine.structured.backends.followed import (
    LEAF_SHAPES,
    check_kind,
    is_plain,
    schema_of,
    unanchored,
)
from tandem.engine.structured.errors import GrammarError
from tandem.protocol.structured import StructuredOutputsParams

NAME = "lm-format-enforcer"
_SHAPES = (
    "type properties required additionalProperties",
    "type additionalProperties",
    "type items minItems maxItems",
    *LEAF_SHAPES,
)
_NUMBER = frozenset("0123456789.")


def prepared(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the form as the library reads it. Raises GrammarError."""
    check_kind(wanted, NAME, ("choice", "regex", "json", "json_object"))
    for name in ("whitespace_pattern", "disable_any_whitespace"):
        if getattr(wanted, name):
            raise GrammarError(f"without {name}, which {NAME} does not support")
    if wanted.kind == "choice":
        return StructuredOutputsParams(regex="|".join(map(re.escape, wanted.choice or ())))
    if wanted.kind == "regex":
        return StructuredOutputsParams(regex=unanchored(wanted.regex or ""))
    schema = schema_of(wanted, NAME, _SHAPES, has_value=is_plain)
    return msgspec.structs.replace(wanted, json=schema, json_object=None)


class EnforcerMatcher:
    """Matcher over a parser, which no call changes."""

    def __init__(self, data: Any, texts: Sequence[str], parser: Any) -> None:
        self._data, self._texts, self._parser = data, texts, parser

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            for sign in self._texts[token] or ("",):
                if not sign or sign not in self._parser.get_allowed_characters():
                    raise GrammarError(f"another token than {token}, which is not allowed here")
                self._parser = self._parser.add_character(sign)

    def fill(self, words: memoryview) -> None:
        from lmformatenforcer import TokenEnforcer

        tokens = TokenEnforcer(self._data, self._parser).get_allowed_tokens([]).allowed_tokens
        allowed = np.zeros(8 * len(words) + 1, np.bool_)
        allowed[tokens] = True
        if allowed[self._data.eos_token_id] and not self.is_accepting:
            raise GrammarError(f"a format that {NAME} supports")  # its answer to any exception
        allowed[self._data.eos_token_id] = False
        words[:] = np.packbits(allowed[:-1], bitorder="little").tobytes()

    @property
    def is_accepting(self) -> bool:
        return bool(self._parser.can_end())

    def copy(self) -> EnforcerMatcher:
        return EnforcerMatcher(self._data, self._texts, self._parser)


class _StrictJson:
    """Parser without the library's invalid JSON: a comma before the end of an object, exponents
    after a point or in integers."""

    def __init__(self, parser: Any, last: str = "", in_string: bool = False) -> None:
        """``last``: the last character that is not white space; "" after an escaped one."""
        self._parser, self._last, self._in_string = parser, last, in_string

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def add_character(self, sign: str) -> _StrictJson:
        escaped = self._in_string and self._last == "\\"
        in_string = self._in_string if escaped else self._in_string ^ (sign == '"')
        last = "" if escaped else sign if in_string or not sign.isspace() else self._last
        return _StrictJson(self._parser.add_character(sign), last, in_string)

    def get_allowed_characters(self) -> str:
        allowed: str = self._parser.get_allowed_characters()
        if self._in_string:
            return allowed
        if self._last == ",":
            return allowed.replace("}", "")
        return re.sub("[eE]", "", allowed) if self._last in _NUMBER else allowed


class EnforcerBackend:
    """Library of one vocabulary."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        from lmformatenforcer import CharacterLevelParserConfig, TokenEnforcerTokenizerData

        texts = [each.decode(errors="ignore") for each in tokens]
        texts = [
            text if text.encode() == each else "" for text, each in zip(texts, tokens, strict=True)
        ]
        whole = [(token, text, True) for token, text in enumerate(texts) if text]
        self._texts, end = texts, len(tokens)
        signs = {sign for _, text, _ in whole for sign in text if sign >= " "}
        self._config = CharacterLevelParserConfig(alphabet="".join(signs))
        self._data = TokenEnforcerTokenizerData(whole, str, end, False, end)
        vars(self._data)["tokenizer_alphabet"] = (
            self._config.alphabet
        )  # the library's default lacks characters

    def compile(self, wanted: StructuredOutputsParams) -> EnforcerMatcher:
        from lmformatenforcer import JsonSchemaParser, RegexParser

        parser: Any
        if wanted.regex is not None:
            parser = RegexParser(wanted.regex, self._config)
        else:
            parser = _StrictJson(JsonSchemaParser(json.loads(wanted.json or "{}"), self._config))
        return EnforcerMatcher(self._data, self._texts, parser)
