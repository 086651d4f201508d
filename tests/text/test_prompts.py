"""Prompts come as texts, ids, or batches of either."""

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.text.prompts import TextPrompt, TokensPrompt, parse_prompt, parse_prompts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", [TextPrompt("hi")]),
        ("", [TextPrompt("")]),
        ([1, 2], [TokensPrompt((1, 2))]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([[1], [2, 3]], [TokensPrompt((1,)), TokensPrompt((2, 3))]),
        (["a", [1]], [TextPrompt("a"), TokensPrompt((1,))]),
        ({"prompt": "a"}, [TextPrompt("a")]),
        ({"prompt_token_ids": [1]}, [TokensPrompt((1,))]),
        ([{"prompt": "a", "prompt_token_ids": [1]}], [TokensPrompt((1,), "a")]),
        (TextPrompt("a"), [TextPrompt("a")]),
        ([TokensPrompt((1,))], [TokensPrompt((1,))]),
    ],
)
def test_every_form_becomes_a_list(value: object, expected: list[object]) -> None:
    """One prompt is a batch of one; a list of numbers is one prompt."""
    assert parse_prompts(value) == expected


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], r"prompt: \[\]"),
        (5, "prompt: 5"),
        (None, "prompt: None"),
        (b"bytes", "prompt: b'bytes'"),
        ([1, "a"], "prompt: 'a'"),
        ([1, 2.5], "prompt: 2.5"),
        (["a", 1], r"prompt\[1\]: 1"),
        ([True, 1], "prompt: True"),
        ([None], r"prompt\[0\]: None"),
        ({}, "prompt: {}"),
        ({"prompt": 5}, "prompt.prompt: 5"),
        ({"prompt_token_ids": "ids"}, "prompt: "),
        ({"prompt": "a", "prompt_token_ids": 5}, "prompt: "),
        ([{"prompt_token_ids": ["x"]}], r"prompt\[0\].prompt_token_ids: 'x'"),
    ],
)
def test_what_is_no_prompt_is_refused_by_field(value: object, field: str) -> None:
    """The error says which element of a batch it is about."""
    with pytest.raises(InvalidParameter, match=f"^{field}"):
        parse_prompts(value)


def test_an_empty_list_of_ids_is_a_prompt_of_its_own() -> None:
    """Where one prompt is asked for; it is refused later, for having no token."""
    assert parse_prompt([]) == TokensPrompt(())
