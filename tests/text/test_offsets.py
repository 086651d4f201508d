"""Where each token of a prompt or an answer begins in the text that a client sees."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.text.output_processor import AnswerOffsets, echoed_prompt
from tandem.text.tokenizer import Tokenizer

TEXTS = [
    "the quick brown fox",
    "  naïve café  ",
    "😀 and 日本語\n\n",
    "<|start|>user\nhello<|end|>\n",
    "plain added token é added",
]


def spelled_at(tokenizer: Tokenizer, text: str, ids: list[int], offsets: list[int]) -> list[str]:
    """What stands in the text where each token begins, as long as the token is."""
    return [
        text[at : at + len(tokenizer.token_text(token))]
        for token, at in zip(ids, offsets, strict=True)
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_of_ids_is_spelled_out_with_its_special_tokens(
    byte_level: Tokenizer, text: str
) -> None:
    """Text and offsets come from the same tokens, so that each whole one stands where it says."""
    ids = byte_level.encode(text)
    shown = echoed_prompt(byte_level, None, ids)
    there = spelled_at(byte_level, shown.text, ids, shown.offsets)

    assert shown.text == text
    for token, piece in zip(ids, there, strict=True):
        whole = byte_level.token_text(token)
        assert piece == whole or "\ufffd" in whole


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "word_piece", "with_bos"])
@pytest.mark.parametrize("text", TEXTS[:3])
def test_a_prompt_of_text_is_shown_as_the_client_wrote_it(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    """Offsets rise from 0 and stay within it, one per token, whatever the tokenizer adds."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    shown = echoed_prompt(tokenizer, text, ids)

    assert shown.text == text
    assert len(shown.offsets) == len(ids)
    assert shown.offsets == sorted(shown.offsets)
    assert shown.offsets[0] >= 0
    assert shown.offsets[-1] <= len(text)


class Releasing:
    """A backend of which only what lets other threads run may be called on a text."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        assert name != "encode"
        return getattr(self._backend, name)


def test_other_threads_run_while_a_prompt_is_looked_at(
    with_bos: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = with_bos.encode("the quick")
    offsets = with_bos.offsets("the quick", ids)
    monkeypatch.setattr(with_bos, "_backend", Releasing(with_bos._backend))

    assert offsets == [0, 0, 3]
    assert with_bos.offsets("the quick", ids) == offsets
    assert with_bos.offsets("the quick", ids[:-1]) is None


def test_an_added_token_takes_no_place(with_bos: Tokenizer) -> None:
    """A BOS that the tokenizer put there is none of the client's text."""
    ids = with_bos.encode("the quick")
    shown = echoed_prompt(with_bos, "the quick", ids)

    assert shown.offsets[:2] == [0, 0]
    assert spelled_at(with_bos, shown.text, ids[1:], shown.offsets[1:]) == [
        with_bos.token_text(token) for token in ids[1:]
    ]


def test_a_prompt_that_was_cut_is_shown_as_what_is_left(byte_level: Tokenizer) -> None:
    """The text that the client gave has more than the tokens."""
    ids = byte_level.encode("the quick brown fox")[-2:]
    shown = echoed_prompt(byte_level, "the quick brown fox", ids)

    assert shown.text == byte_level.decode(ids)
    assert shown.offsets == [0, len(byte_level.token_text(ids[0]))]


@pytest.mark.parametrize("skip", [True, False])
def test_tokens_of_an_answer_begin_where_their_text_does(byte_level: Tokenizer, skip: bool) -> None:
    """A hidden special token takes no place; the parts of a character begin where it does."""
    ids = byte_level.encode("a😀<|end|>b")
    offsets = AnswerOffsets(byte_level, skip_special_tokens=skip, context=(), start=5)
    places = [place for token in ids for place in offsets.place([token])]
    end, last = (2, 2) if skip else (2, 2 + len("<|end|>"))

    assert places[0] == 5
    assert set(places[1:-2]) == {6}
    assert places[-2:] == [5 + end, 5 + last]
