"""The model's tokenizer, from the files of a prepared folder. Every method is thread-safe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions, ChatTemplates
from tandem.text.errors import UnusableFolder
from tandem.text.folder import TokenizerSettings, read_settings
from tandem.text.pieces import (
    ByteTable,
    Detokenizer,
    TableDetokenizer,
    WholeTexts,
    WindowDetokenizer,
    bytes_rule,
)

MOST_COPIED = 64
"""Bound of the characters copied to join system messages, in multiples of the text bound."""


def check_chat(messages: Sequence[Mapping[str, Any]], most_chars: int) -> None:
    """Raise InvalidParameter for a chat of more than ``most_chars`` characters.

    Also raises for too many long system messages. Invalid messages are not counted.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return
    whole = system = copied = 0
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        size = _message_size(message)
        whole += size
        if message.get("role") in ("system", "developer"):
            system += size
            copied += system
    if whole > most_chars:
        allowed = f"at most {most_chars} characters in all messages; they have {whole}"
        raise InvalidParameter("messages", messages, allowed)
    if copied > MOST_COPIED * most_chars:
        allowed = (
            f"fewer or shorter system messages: each counted with all before it they have {copied} "
            f"characters, of {MOST_COPIED * most_chars} at most"
        )
        raise InvalidParameter("messages", messages, allowed)


def _message_size(message: Mapping[str, Any]) -> int:
    """Return the characters that templates write of a message.

    Reasoning under both of its names counts once.
    """
    thoughts = (message.get("reasoning"), message.get("reasoning_content"))
    calls = (message.get("tool_calls"), message.get("function_call"))
    size = _size(message.get("content")) + _size(message.get("refusal"))
    return size + max(map(_size, thoughts)) + sum(map(_all_texts, calls))


def _all_texts(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _all_texts(each) for key, each in value.items())
    return sum(map(_all_texts, value)) if isinstance(value, list) else 0


def _size(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        return sum(len(each) for each in content.values() if isinstance(each, str))
    return sum(map(_size, content)) if isinstance(content, list) else 0


_MAX_ID = 2**32
"""Exclusive bound of ids in the tokenizers package."""


class Tokenizer:
    """Text to ids and back."""

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: TokenizerSettings | None = None
    ) -> None:
        settings = settings if settings is not None else TokenizerSettings()
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.max_text_chars: int | None = None
        """Maximum characters of a text; set by a server."""
        self.chat_templates = ChatTemplates(settings.chat_templates, settings.named_tokens)
        self.config: Mapping[str, Any] = settings.config
        self.generation: Mapping[str, Any] = settings.generation
        """Content of generation_config.json: the model's sampling defaults."""
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        """Ids that ``skip_special_tokens`` omits."""
        self.bos_token_id = self._named_id(settings, "bos_token")
        self.eos_token_id = self._named_id(settings, "eos_token")
        named = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*named, *settings.eos_token_ids)))
        """Ids that end an output, the tokenizer's own first."""
        self._seeing_tables: dict[frozenset[int], tuple[ByteTable, WholeTexts]] = {}
        self._rule = rule = bytes_rule(json.loads(backend.to_str())["decoder"])
        self._tables = (
            None
            if rule is None
            else (
                ByteTable(backend.id_to_token, rule),
                ByteTable(backend.id_to_token, rule, self.special_ids),
            )
        )
        self._whole = tuple(WholeTexts(table) for table in self._tables or ())

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Return the tokenizer of a prepared folder. Raises UnusableFolder."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UnusableFolder(f"{folder} has no tokenizer.json; prepare the model first")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise UnusableFolder(f"{path} cannot be read: {error}") from error
        return cls(backend, read_settings(Path(folder)))

    @property
    def spells_bytes(self) -> bool:
        """Return whether a token has the same text anywhere."""
        return self._tables is not None

    @cached_property
    def letter(self) -> tuple[int, ...]:
        """Return the ids of a letter, as context of a prompt whose tokens are not known.

        With it, an answer's first word keeps the space before it.
        """
        return tuple(self.encode("a", add_special_tokens=False))

    @cached_property
    def vocab_size(self) -> int:
        """Return one more than the highest id; a padded vocabulary may be larger."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token(self) -> int:
        """Return the characters of the longest vocabulary entry."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(map(len, vocabulary), default=1)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Return the ids of ``text``, in which special tokens may be spelled.

        Other threads run meanwhile. Raises InvalidParameter that names ``param``.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens, param=param)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[list[int]]:
        """Return the ids of each text, as ``encode``, on all cores."""
        limit = self.max_text_chars
        for text in texts:
            if limit is not None and len(text) > limit:
                allowed = f"at most {limit} characters; it has {len(text)}"
                raise InvalidParameter(param, text, allowed)
        try:
            # The batch call releases the GIL and omits offsets, in half the time.
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidParameter(param, texts[0], "text in valid Unicode") from error
        return [each.ids for each in encoded]

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        params: tuple[str, str],
        keep: int | None = None,
        from_left: bool = False,
    ) -> tuple[list[int], int | None]:
        """Return the ids of two texts as one prompt, as the tokenizer joins pairs.

        Also return the position of the second text, if its tokens have another type. At most
        ``keep`` ids are returned: the second text is cut, at its end or ``from_left``. Raises
        InvalidParameter that names a text by ``params``, also if nothing of the second is left.
        """
        limit = self.max_text_chars
        for text, param in zip((first, second), params, strict=True):
            if limit is not None and len(text) > limit:
                allowed = f"at most {limit} characters; it has {len(text)}"
                raise InvalidParameter(param, text, allowed)
            if not text.isascii():
                _check_unicode(text, param)
        (joined,) = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        ids, types = joined.ids, joined.type_ids
        dropped = 0 if keep is None else len(ids) - keep
        if dropped > 0:
            places = [at for at, text in enumerate(joined.sequence_ids) if text == 1]
            if dropped >= len(places):
                allowed = f"fewer tokens: with it no token of {params[1]} is among the {keep} kept"
                raise InvalidParameter(params[0], first, allowed)
            start = places[0] if from_left else places[-1] + 1 - dropped
            del ids[start : start + dropped]
        return ids, types.index(1) if 1 in types else None

    def offsets(self, text: str, ids: Sequence[int]) -> list[int] | None:
        """Return the offset of each id in ``text``, in characters; None if the ids are others.

        Other threads run meanwhile.
        """
        for add_special_tokens in (True, False):
            # Of the calls that give offsets, only the batch call releases the GIL.
            (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            if encoded.ids == list(ids):
                return _rising([start for start, _ in encoded.offsets])
        return None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Ids beyond the vocabulary have no text."""
        for token_id in ids:
            if not 0 <= token_id < _MAX_ID:
                raise InvalidParameter("tokens", token_id, "ids from 0 on, in 32 bits")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """Return the ids of all vocabulary entries."""
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values())

    def check_known(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidParameter that names every id outside the vocabulary."""
        unknown = sorted(set(ids) - self.known_ids)
        if unknown:
            value = unknown if len(unknown) > 1 else unknown[0]
            raise InvalidParameter(param, value, f"token ids from 0 to {self.vocab_size - 1}")

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that ``token_id`` adds to a text, special tokens included."""
        if self._tables is not None:
            return self._tables[0][token_id]
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return a token's bytes as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        seen: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Return a detokenizer for one choice that continues the prompt ``context``.

        Special tokens in ``seen`` are kept although others are skipped.
        """
        if skip_special_tokens and seen:
            return self._seeing(seen, context)
        if self._tables is not None:
            index = int(skip_special_tokens)
            return TableDetokenizer(self._tables[index], self._whole[index])

        def decode(ids: list[int]) -> str:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, context)

    def _seeing(self, seen: frozenset[int], context: Sequence[int]) -> Detokenizer:
        hidden = self.special_ids - seen
        if self._rule is not None:
            if seen not in self._seeing_tables:
                table = ByteTable(self._backend.id_to_token, self._rule, hidden)
                self._seeing_tables[seen] = (table, WholeTexts(table))
            return TableDetokenizer(*self._seeing_tables[seen])

        def decode(ids: list[int]) -> str:
            shown = [each for each in ids if each not in hidden]
            return self._backend.decode(shown, skip_special_tokens=False)

        return WindowDetokenizer(decode, context)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> str:
        """Return the prompt of a chat, to be encoded with ``add_special_tokens=False``."""
        if self.max_text_chars is not None:
            check_chat(messages, self.max_text_chars)
        return self.chat_templates.render(messages, options)

    def _named_id(self, settings: TokenizerSettings, name: str) -> int | None:
        token = settings.named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(param, text, "text in valid Unicode") from error


def _rising(offsets: list[int]) -> list[int]:
    """Return offsets that never decrease: added tokens, whose offset is 0, stay in place."""
    return list(accumulate(offsets, max))
