"""The tokenizer of a prepared folder answers as transformers' does."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import Judged

from tandem.protocol.errors import InvalidParameter
from tandem.text.errors import UnusableFolder
from tandem.text.folder import read_settings
from tandem.text.tokenizer import Tokenizer

judged = Judged("tokenizer")
TEXTS = (
    "",
    " ",
    "The capital of France is Paris.",
    "  two  spaces\tand\ttabs\r\nand\n\nlines  ",
    "Grüße, naïve café, Ελλάδα, 日本語, العربية, עברית",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0\u200b\ufeff",
    "<|im_start|>user\n<|im_end|> <|endoftext|>",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF]}  # ok",
    "1234567890 3.14159 -17 1,000,000",
    "\x00\x01\x7f\ud7ff\U0010ffff",
)
IDS: tuple[list[int], ...] = (
    [],
    [0, 1, 2],
    [504, 3575, 282],
    [49151, 0, 49150],
    [127, 128, 129, 240, 241, 9, 10],
)


@cache
def theirs(folder: Path):
    """transformers' tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_texts_become_the_ids_of_transformers(
    smollm2: Path, tokenizer: Tokenizer, number: int, special: bool
) -> None:
    """With and without the special tokens that a model adds around a text."""
    text = TEXTS[number]
    expected = judged(
        f"{text!r}, {special}", lambda: theirs(smollm2).encode(text, add_special_tokens=special)
    )
    assert expected == tokenizer.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("number", range(len(IDS)))
def test_ids_become_the_text_of_transformers(
    smollm2: Path, tokenizer: Tokenizer, number: int, skip: bool
) -> None:
    ids = IDS[number]
    expected = judged(
        f"{ids}, {skip}", lambda: theirs(smollm2).decode(ids, skip_special_tokens=skip)
    )
    assert expected == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.nightly
@given(text=st.text(max_size=80), special=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_text_becomes_the_ids_of_transformers(
    smollm2: Path, tokenizer: Tokenizer, text: str, special: bool
) -> None:
    expected = theirs(smollm2).encode(text, add_special_tokens=special)
    assert expected == tokenizer.encode(text, add_special_tokens=special)


@pytest.mark.nightly
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_ids_become_the_text_of_transformers(
    smollm2: Path, tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    expected = theirs(smollm2).decode(ids, skip_special_tokens=skip)
    assert expected == tokenizer.decode(ids, skip_special_tokens=skip)


def test_the_embedded_model_ends_where_transformers_ends_it(
    smollm2: Path, tokenizer: Tokenizer
) -> None:
    """End-of-sequence, BOS, special ids and vocabulary are read from the folder."""

    def ask() -> dict[str, Any]:
        made = theirs(smollm2)
        return {
            "eos": made.eos_token_id,
            "bos": made.bos_token_id,
            "special": sorted(made.all_special_ids),
            "size": len(made),
            "im_end": made.convert_tokens_to_ids("<|im_end|>"),
        }

    expected = judged("ends", ask)
    assert expected["eos"] == tokenizer.eos_token_id
    assert (expected["eos"],) == tokenizer.eos_token_ids
    assert expected["bos"] == tokenizer.bos_token_id
    assert set(expected["special"]) <= tokenizer.special_ids
    assert expected["size"] == tokenizer.vocab_size
    assert expected["im_end"] == tokenizer.token_id("<|im_end|>")


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_of_tokens_joined_are_the_text(byte_level: Tokenizer, data: st.DataObject) -> None:
    """What logprobs show as bytes adds up to what the client reads."""
    text = data.draw(st.text(max_size=40))
    ids = byte_level.encode(text, add_special_tokens=False)

    assert text == b"".join(map(byte_level.token_bytes, ids)).decode()


def test_parts_of_characters_have_bytes_and_a_replacement(byte_level: Tokenizer) -> None:
    """A token that is no text of its own still says exactly what it is."""
    first = byte_level.encode("😀", add_special_tokens=False)[0]

    assert "😀".encode().startswith(byte_level.token_bytes(first))
    assert byte_level.token_text(first) == "\ufffd"
    assert byte_level.token_text(byte_level.token_id("<|end|>") or 0) == "<|end|>"


def test_a_tokenizer_without_a_table_still_has_texts(word_piece: Tokenizer) -> None:
    assert word_piece.token_text(word_piece.token_id("the") or 0) == "the"
    assert word_piece.longest_token >= 3


@pytest.mark.parametrize("text", ["\ud800", 5, None])
def test_what_is_not_text_is_refused(byte_level: Tokenizer, text) -> None:
    """JSON can spell half a surrogate pair; the error names the field."""
    with pytest.raises(InvalidParameter, match=r"^bad_words: .*valid Unicode"):
        byte_level.encode(text, param="bad_words")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_that_cannot_be_are_refused(byte_level: Tokenizer, token: int) -> None:
    """Ids beyond the vocabulary stand for nothing; what is no id at all is an error."""
    assert byte_level.decode([100_000]) == ""
    with pytest.raises(InvalidParameter, match=rf"^tokens: {token} "):
        byte_level.decode([0, token])


def write(folder: Path, **files: object) -> None:
    """Each file by its name without the ending, as JSON."""
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def test_every_place_of_end_ids_is_read(tmp_path: Path) -> None:
    """generation_config.json wins over config.json; both may hold one id or several."""
    write(tmp_path, config={"eos_token_id": 7})
    assert read_settings(tmp_path).eos_token_ids == (7,)

    write(tmp_path, generation_config={"eos_token_id": [3, 4], "temperature": 0.6})
    found = read_settings(tmp_path)
    assert found.eos_token_ids == (3, 4)
    assert found.generation["temperature"] == 0.6

    assert read_settings(tmp_path / "nowhere").eos_token_ids == ()


def test_tokens_are_named_by_text_or_object(tmp_path: Path) -> None:
    """Both spellings of tokenizer_config.json work, and special_tokens_map.json fills in."""
    write(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None},
        special_tokens_map={"unk_token": "<unk>", "eos_token": "<old>"},
    )

    assert read_settings(tmp_path).named_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def test_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    """In tokenizer_config.json, alone or by name, and in files, which win."""
    write(
        tmp_path,
        tokenizer_config={
            "chat_template": [
                {"name": "default", "template": "A"},
                {"name": "tool_use", "template": "B"},
            ]
        },
    )
    assert read_settings(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}

    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
    found = read_settings(tmp_path).chat_templates
    assert found == {"default": "C", "tool_use": "B", "rag": "D"}

    write(tmp_path, tokenizer_config={"chat_template": "E"})
    (tmp_path / "chat_template.jinja").unlink()
    assert read_settings(tmp_path).chat_templates["default"] == "E"


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)

    with pytest.raises(UnusableFolder, match=r"tokenizer_config\.json"):
        read_settings(tmp_path)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    """So is a tokenizer that is none."""
    with pytest.raises(UnusableFolder, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnusableFolder, match="cannot be read"):
        Tokenizer.load(tmp_path)
