"""What sampling parameters allow."""

import math
from typing import Any

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams, from_mapping, seeded
from tandem.protocol.structured import MAX_CHOICES, StructuredOutputsParams


def test_defaults_are_valid_and_pinned() -> None:
    """The defaults are OpenAI's, and nothing is filtered by default."""
    params = SamplingParams().verify()

    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.0, 1.0, None)
    assert params.seed is None
    assert not params.greedy


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.5),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("bad_words", ("",)),
        ("allowed_token_ids", ()),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
    ],
)
def test_a_value_out_of_range_is_named(param: str, value: object) -> None:
    """The error says which field, which value and what would be allowed."""
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{param: value}).verify()  # type: ignore[arg-type]

    assert caught.value.param == param
    assert caught.value.allowed in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    """A minimum over the maximum can never be met."""
    with pytest.raises(InvalidParameter, match="max_tokens, which is 3"):
        SamplingParams(min_tokens=4, max_tokens=3).verify()


def test_a_bias_out_of_range_names_its_token() -> None:
    """The error of a logit bias names the token it is for."""
    with pytest.raises(InvalidParameter, match=r"logit_bias\.7"):
        SamplingParams(logit_bias={7: 101.0}).verify()


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": (100,)},
        {"allowed_token_ids": (-1,)},
        {"logit_bias": {100: 1.0}},
        {"bad_words_token_ids": ((3, 100),)},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
    ],
)
def test_the_vocabulary_bounds_ids_and_counts(fields: dict[str, object]) -> None:
    """Ids outside the vocabulary and too many logprobs are refused."""
    with pytest.raises(InvalidParameter):
        SamplingParams(**fields).verify_vocabulary(100, 20)  # type: ignore[arg-type]

    fits = SamplingParams(stop_token_ids=(99,), logprobs=20)
    assert fits.verify_vocabulary(100, 20) is fits


def test_a_seed_given_is_kept() -> None:
    """The router's seed only fills a gap, which -1 asks for, too."""
    for given in (5, 0, -2):
        assert seeded(SamplingParams(seed=given).verify(), 9).seed == given
    for none in (None, -1):
        assert seeded(SamplingParams(seed=none).verify(), 9).seed == 9


def test_plain_values_are_checked_for_name_and_type() -> None:
    """An unknown name and a wrong type are errors, not surprises."""
    assert from_mapping({"temperature": 0, "stop": ["a"]}).stop == ("a",)
    with pytest.raises(InvalidParameter, match="temprature"):
        from_mapping({"temprature": 1})
    with pytest.raises(InvalidParameter):
        from_mapping({"top_k": "many"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"choice": ["a"], "regex": "b"}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, "structured_outputs.choice"),
        ({"choice": ["x" * 70_000]}, "structured_outputs.choice"),
        ({"regex": "x" * 20_000}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "5"}, "structured_outputs.json"),
        ({"json": '{"a":' * 65 + "1" + "}" * 65}, "structured_outputs.json"),
        ({"json": "[" * 100_000}, "structured_outputs.json"),
        ({"json": '"' + "x" * 140_000 + '"'}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"grammar": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"json": "{}", "whitespace_pattern": "x" * 300}, "structured_outputs.whitespace_pattern"),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_structured_outputs_are_one_thing_within_bounds(fields: dict[str, Any], param: str) -> None:
    """The error names the field as clients write it."""
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(**fields)).verify()
    assert caught.value.param == param


def test_structured_outputs_come_from_a_mapping_whole() -> None:
    """An unknown kind is an error, never an answer without a grammar."""
    params = from_mapping({"structured_outputs": {"choice": ["a", "b"]}})
    assert params.structured_outputs == StructuredOutputsParams(choice=["a", "b"])
    with pytest.raises(InvalidParameter, match="xml"):
        from_mapping({"structured_outputs": {"choice": ["a"], "xml": {}}})
