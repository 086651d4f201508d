"""Sampling parameters from mappings and from the model's own defaults."""

import logging
from typing import Any

import pytest

from tandem.llm.sampling import defaults_of, params_from
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams


def test_the_models_defaults_are_taken_by_our_names() -> None:
    """Only what concerns sampling; null is nothing."""
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "bos_token_id": 1}

    found = defaults_of({**generation, "top_p": None})

    assert found == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}


def test_a_default_that_is_not_allowed_is_left_out_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """A model with an odd default can be served all the same."""
    with caplog.at_level(logging.WARNING):
        assert defaults_of({"temperature": 9.0, "min_p": 0.1}) == {"min_p": 0.1}

    assert "temperature is left out" in caplog.text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SamplingParams(temperature=0.5)),
        ({}, SamplingParams(temperature=0.5)),
        ({"temperature": 0}, SamplingParams(temperature=0)),
        ({"stop": "x"}, SamplingParams(temperature=0.5, stop=("x",))),
        ({"stop": ["x", "y"]}, SamplingParams(temperature=0.5, stop=("x", "y"))),
        ({"stop": None, "bad_words": "no"}, SamplingParams(temperature=0.5, bad_words=("no",))),
        ({"logit_bias": {"5": 1}}, SamplingParams(temperature=0.5, logit_bias={5: 1.0})),
        (SamplingParams(top_k=3), SamplingParams(top_k=3)),
    ],
)
def test_parameters_are_filled_up(given: Any, expected: SamplingParams) -> None:
    """A mapping with defaults; a struct stays as it is."""
    assert params_from(given, {"temperature": 0.5}) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"tmperature": 1},
        {"n": 0},
        {"top_p": "x"},
        {"stop": [5]},
        SamplingParams(temperature=9.0),
    ],
)
def test_what_is_not_allowed_is_refused(given: Any) -> None:
    """Unknown names, wrong types, wrong ranges; a struct is verified here and not later."""
    with pytest.raises(InvalidParameter):
        params_from(given)
