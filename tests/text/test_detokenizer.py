"""Ids become the same text one by one as at once."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import models

from tandem.text.pieces import Detokenizer, TableDetokenizer, WindowDetokenizer
from tandem.text.tokenizer import Tokenizer

TEXTS = st.text(max_size=60)
HARD_TEXTS = [
    "naïve café, Ünïcödé",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301a\u0308 combining, Z͑ͫ̓ͪ̂ͫ̽͏̴̙",
    "日本語 한국어 العربية עברית",
    "\ufffd is a character too",
    "tabs\tand\r\nlines\x00",
    "",
]


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """Text of each id, and of the end."""
    return [*map(detokenizer.feed, ids), detokenizer.end()]


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_byte_level_stream_to_the_one_shot_text(
    byte_level: Tokenizer, skip: bool, data: st.DataObject
) -> None:
    """Also ids that are no UTF-8, special tokens, added tokens and ids beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=40))

    parts = streamed(byte_level.detokenizer(skip_special_tokens=skip), ids)

    assert byte_level.decode(ids, skip_special_tokens=skip) == "".join(parts)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_the_real_model_stream_to_the_one_shot_text(
    real: Tokenizer, data: st.DataObject
) -> None:
    """The same for the embedded model, whose vocabulary has many halves of characters."""
    ids = data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=40))

    assert real.decode(ids) == "".join(streamed(real.detokenizer(), ids))


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_no_half_of_a_character_is_ever_shown(real: Tokenizer, text: str) -> None:
    """Every piece of a text that was encoded is a piece of that text, without U+FFFD.

    (The model's vocabulary lacks the bytes of a few unused planes; those texts do not come back.)
    """
    ids = real.encode(text, add_special_tokens=False)
    assume(real.decode(ids, skip_special_tokens=False) == text)

    parts = streamed(real.detokenizer(skip_special_tokens=False), ids)

    assert text == "".join(parts)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_come_back_from_every_family(
    byte_level: Tokenizer, sentencepiece: Tokenizer, real: Tokenizer, text: str
) -> None:
    """Emoji sequences, combining marks, right-to-left scripts and control characters survive."""
    for tokenizer in (byte_level, sentencepiece, real):
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = streamed(tokenizer.detokenizer(), ids)

        assert text == "".join(parts).removeprefix(" " if tokenizer is sentencepiece else "")


def test_an_emoji_of_four_byte_tokens_comes_with_the_last(sentencepiece: Tokenizer) -> None:
    """Nothing is shown before the character is whole."""
    ids = sentencepiece.encode("😀", add_special_tokens=False)[-4:]

    assert streamed(sentencepiece.detokenizer(), ids) == ["", "", "", "😀", ""]


@given(text=TEXTS.filter(lambda text: "▁" not in text))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_goes_on_after_a_prompt_with_its_spaces(
    sentencepiece: Tokenizer, text: str
) -> None:
    """An answer that starts with a space keeps it: only a text of its own loses the first."""
    ids = sentencepiece.encode(text, add_special_tokens=False)

    shown = "".join(streamed(sentencepiece.detokenizer(), ids))

    assert sentencepiece.decode(ids) == shown.removeprefix(" ")


def test_a_character_that_never_ends_becomes_one_replacement(byte_level: Tokenizer) -> None:
    """The end of the output shows what decoding at once would show."""
    half = byte_level.encode("😀", add_special_tokens=False)[:-1]

    parts = streamed(byte_level.detokenizer(), half)

    assert "".join(parts) == "\ufffd"
    assert "".join(parts[:-1]) == ""


def test_special_tokens_are_left_out_or_spelled(byte_level: Tokenizer) -> None:
    """``skip_special_tokens`` decides, token by token."""
    ids = byte_level.encode("a<|end|>b", add_special_tokens=False)

    assert "".join(streamed(byte_level.detokenizer(), ids)) == "ab"
    spelled = streamed(byte_level.detokenizer(skip_special_tokens=False), ids)
    assert spelled == ["a", "<|end|>", "b", ""]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_word_pieces_stream_to_what_follows_the_prompt(
    word_piece: Tokenizer, data: st.DataObject
) -> None:
    """Without a table, the texts joined are what the answer adds to the prompt's text."""
    some = st.lists(st.integers(0, word_piece.vocab_size - 1), max_size=50)
    context, ids = data.draw(some), data.draw(some)
    prompt = word_piece.decode(context)

    detokenizer = word_piece.detokenizer(context=context)
    shown = "".join(streamed(detokenizer, ids))

    assert isinstance(detokenizer, WindowDetokenizer)
    if any(token not in word_piece.special_ids for token in context[-6:]):
        assert word_piece.decode([*context, *ids]) == prompt + shown


def test_a_window_waits_for_whole_characters_but_not_for_ever(byte_level: Tokenizer) -> None:
    """The window decoder joins split characters too, and shows endless rubbish in the end."""
    emoji = byte_level.encode("a😀", add_special_tokens=False)
    rubbish = [byte_level.encode("😀", add_special_tokens=False)[0]] * 12

    parts = streamed(WindowDetokenizer(byte_level.decode), emoji)
    shown = [part for part in map(WindowDetokenizer(byte_level.decode).feed, rubbish) if part]

    assert "".join(parts) == "a😀"
    assert not any("\ufffd" in part for part in parts)
    assert shown


def test_byte_level_tokenizers_use_the_table(byte_level: Tokenizer, real: Tokenizer) -> None:
    """The fast way serves the families that Tandem serves."""
    assert isinstance(byte_level.detokenizer(), TableDetokenizer)
    assert isinstance(real.detokenizer(), TableDetokenizer)


def test_a_tokenizer_without_decoder_is_decoded_in_windows() -> None:
    """Its tokens are joined by spaces, as decoding at once joins them."""
    words = {"the": 0, "dog": 1, "sleeps": 2}
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel(words, unk_token="the")))

    assert "".join(streamed(tokenizer.detokenizer(), [0, 1, 2])) == "the dog sleeps"
