"""Input forms of a prompt: text, ids, embeddings, or a batch of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.protocol.embeds import MOST_BYTES, PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.text.embeds import is_tensor, of_tensor, read_embeds


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenize."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, used unchanged; ``text`` if the caller knows it."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """Vectors in place of ids."""

    embeds: PromptEmbeds
    param: str = "prompt_embeds"
    text: str | None = None


Prompt = TextPrompt | TokensPrompt | EmbedsPrompt

PromptLike = str | Sequence[int] | Mapping[str, object] | TextPrompt | TokensPrompt | EmbedsPrompt
"""One prompt. Mappings have ``prompt``, ``prompt_token_ids`` or ``prompt_embeds``.

Embeddings are a tensor of torch or numpy, or the bytes of a safetensors file.
"""

_IDS = tuple[int, ...]

_ALLOWED = "a text, a list of token ids, or a list of texts or lists of token ids"


def parse_prompt(value: object, *, param: str = "prompt") -> Prompt:
    """Return one prompt. Raises InvalidParameter that names ``param``."""
    if isinstance(value, TextPrompt | TokensPrompt | EmbedsPrompt):
        return value
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, Mapping):
        return _parse_mapping(value, param)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return TokensPrompt(_parse_ids(value, param))
    raise InvalidParameter(param, value, "a text or a list of token ids")


def parse_prompts(value: object, *, param: str = "prompt") -> list[Prompt]:
    """Return one prompt or a batch as a list. Raises InvalidParameter, also for ``[]``."""
    batch = _batch_of(value)
    if batch is None:
        return [parse_prompt(value, param=param)]
    if not batch:
        raise InvalidParameter(param, [], f"{_ALLOWED}, not empty")
    return [parse_prompt(each, param=f"{param}[{index}]") for index, each in enumerate(batch)]


def _batch_of(value: object) -> Sequence[object] | None:
    """Return the list if its first element is a separate prompt, or if it is empty; else None."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    return None if value and isinstance(value[0], int) else value


def _parse_mapping(value: Mapping[object, object], param: str) -> Prompt:
    text, ids = value.get("prompt"), value.get("prompt_token_ids")
    embeds, name = value.get("prompt_embeds"), f"{param}.prompt_embeds"
    if embeds is not None:
        if text or ids:
            allowed = "an object with one of prompt, prompt_token_ids and prompt_embeds"
            raise InvalidParameter(param, sorted(map(str, value)), allowed)
        if isinstance(embeds, bytes):
            embeds = read_embeds(embeds, name, max_bytes=MOST_BYTES)
        if is_tensor(embeds):
            embeds = of_tensor(embeds, name)
        if not isinstance(embeds, PromptEmbeds):
            raise InvalidParameter(
                name, type(embeds).__name__, "a tensor, or bytes of a safetensors file"
            )
        return EmbedsPrompt(embeds, name)
    if text is not None and not isinstance(text, str):
        raise InvalidParameter(f"{param}.prompt", text, "a text")
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return TokensPrompt(_parse_ids(ids, f"{param}.prompt_token_ids"), text)
    if text is None or ids is not None:
        raise InvalidParameter(param, dict(value), "an object with prompt or prompt_token_ids")
    return TextPrompt(text)


def _parse_ids(values: Sequence[object], param: str) -> tuple[int, ...]:
    try:
        return msgspec.convert(values, _IDS)
    except msgspec.ValidationError:
        return tuple(_whole(value, param) for value in values)


def _whole(value: object, param: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(param, value, "token ids: whole numbers")
    return value
