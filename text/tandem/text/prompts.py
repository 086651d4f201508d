"""The forms in which a prompt may come: text, ids, or a batch of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.protocol.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """To be tokenized."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Ids as they are; ``text`` where the caller knows it."""

    token_ids: tuple[int, ...]
    text: str | None = None


Prompt = TextPrompt | TokensPrompt

PromptLike = str | Sequence[int] | Mapping[str, object] | TextPrompt | TokensPrompt
"""One prompt as callers write it; mappings have ``prompt`` or ``prompt_token_ids``."""

_ALLOWED = "a text, a list of token ids, or a list of texts or lists of token ids"


def parse_prompt(value: object, *, param: str = "prompt") -> Prompt:
    """One prompt. Raises InvalidParameter that names ``param``."""
    if isinstance(value, TextPrompt | TokensPrompt):
        return value
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, Mapping):
        return _parse_mapping(value, param)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return TokensPrompt(_parse_ids(value, param))
    raise InvalidParameter(param, value, "a text or a list of token ids")


def parse_prompts(value: object, *, param: str = "prompt") -> list[Prompt]:
    """One prompt or a batch of them, as a list; ``[]`` is not allowed."""
    batch = _batch_of(value)
    if batch is None:
        return [parse_prompt(value, param=param)]
    if not batch:
        raise InvalidParameter(param, [], f"{_ALLOWED}, not empty")
    return [parse_prompt(each, param=f"{param}[{index}]") for index, each in enumerate(batch)]


def _batch_of(value: object) -> Sequence[object] | None:
    """The list if its first element is a prompt of its own, or if it has none."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    return None if value and isinstance(value[0], int) else value


def _parse_mapping(value: Mapping[object, object], param: str) -> Prompt:
    text, ids = value.get("prompt"), value.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidParameter(f"{param}.prompt", text, "a text")
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return TokensPrompt(_parse_ids(ids, f"{param}.prompt_token_ids"), text)
    if text is None or ids is not None:
        raise InvalidParameter(param, dict(value), "an object with prompt or prompt_token_ids")
    return TextPrompt(text)


def _parse_ids(values: Sequence[object], param: str) -> tuple[int, ...]:
    if set(map(type, values)) - {int}:  # in C: a prompt may have tens of thousands
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidParameter(param, value, "token ids: whole numbers")
    return tuple(values)  # type: ignore[arg-type]  # each was seen to be an int
