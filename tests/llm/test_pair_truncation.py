"""Pairs that are cut lose tokens of their second text alone, as transformers cuts them."""

from __future__ import annotations

import pytest
from tests.llm.encoder_folders import encoder_folder

from tandem.protocol.errors import InvalidParameter
from tandem.text.tokenizer import Tokenizer

QUERY, DOCUMENT = "who", "the capital of France is Paris on the mat"
NAMES = ("query", "documents[0]")


@pytest.mark.parametrize("name", ["bert-pairs", "xlm-roberta-pairs"])
def test_a_pair_is_cut_as_only_second_says(name: str) -> None:
    """To every length, with the special tokens and types of a whole one."""
    folder, _, theirs = encoder_folder(name)
    ours = Tokenizer.load(folder)
    whole, _ = ours.encode_pair(QUERY, DOCUMENT, params=NAMES)
    least = len(whole) - len(theirs(DOCUMENT, add_special_tokens=False)["input_ids"]) + 1
    for keep in range(least, len(whole) + 2):
        for side in ("right", "left"):
            theirs.truncation_side = side
            want = theirs(
                QUERY,
                DOCUMENT,
                truncation="only_second",
                max_length=keep,
                return_token_type_ids=True,
            )
            ids, at = ours.encode_pair(
                QUERY, DOCUMENT, params=NAMES, keep=keep, from_left=side == "left"
            )
            assert ids == want["input_ids"]
            types = want["token_type_ids"]
            assert at == (types.index(1) if 1 in types else None)
    with pytest.raises(InvalidParameter, match=r"query: .who. .*fewer tokens"):
        ours.encode_pair(QUERY, DOCUMENT, params=NAMES, keep=least - 1)
