"""What is found out about a prompt before it is processed: all that takes little."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.protocol.card import ModelCard
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.input_processor import BYTES_A_TOKEN, InputProcessor, seems_to_fit
from tandem.text.tokenizer import Tokenizer

KEY = RequestKey(Incarnation(bytes(16)), "r1", 0)
MakeCard = Callable[..., ModelCard]


@pytest.fixture
def processor(byte_level: Tokenizer, make_card: MakeCard) -> InputProcessor:
    """For a context of 64 tokens and a vocabulary of 512, without seeds of its own."""
    return InputProcessor(byte_level, make_card(), draw_seed=None)


BAD: list[tuple[Any, SamplingParams]] = [
    ("", SamplingParams()),
    ("\ud800", SamplingParams()),
    ("x y z " * 40, SamplingParams()),
    ("x y z " * 400, SamplingParams()),
    ([], SamplingParams()),
    ([512], SamplingParams()),
    ([1] * 64, SamplingParams()),
    ([1] * 60, SamplingParams(max_tokens=5)),
    ("hi", SamplingParams(max_tokens=64)),
    ("hi", SamplingParams(max_tokens=None, min_tokens=64)),
    ("hi", SamplingParams(stop_token_ids=(512,))),
    ("hi", SamplingParams(bad_words=("word " * 90,))),
]


@pytest.mark.parametrize(("prompt", "params"), BAD)
def test_a_check_finds_what_processing_would(
    processor: InputProcessor, prompt: Any, params: SamplingParams
) -> None:
    """The same error, in the same words; the prompt is called what the caller calls it."""
    with pytest.raises(InvalidParameter) as processed:
        processor.process(prompt, params, KEY)
    with pytest.raises(type(processed.value)) as checked:
        processor.check(prompt, params)
    assert str(checked.value) == str(processed.value)
    with pytest.raises(type(processed.value)) as named:
        processor.check(prompt, params, param="prompt[3]")
    assert named.value.param in ("prompt[3]", processed.value.param)
    assert named.value.param != "prompt"


def test_a_text_that_seems_to_fit_is_not_tokenized(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens have fewer than two bytes: a batch is not tokenized twice."""
    monkeypatch.setattr(processor.tokenizer, "encode", None)
    processor.check("hi there" * 15, SamplingParams(max_tokens=4))
    processor.check([1, 2], SamplingParams())
    with pytest.raises(TypeError):
        processor.check("hi there" * 16, SamplingParams())


def test_what_fits_is_counted_in_bytes() -> None:
    five = SamplingParams(max_tokens=5)
    assert seems_to_fit("é" * BYTES_A_TOKEN, five, 7)
    assert not seems_to_fit("é" * BYTES_A_TOKEN, five, 6)
    assert not seems_to_fit("é", SamplingParams(max_tokens=None, min_tokens=9), 9)
    assert not seems_to_fit(" \n", five, 1000)
    assert not seems_to_fit("\ud800", five, 1000)


def test_what_is_pooled_is_checked_by_its_ids(byte_level: Tokenizer, make_card: MakeCard) -> None:
    """The whole context is theirs; of texts only what no tokenizer could fit is found."""
    processor = InputProcessor(byte_level, make_card())
    processor.check_pooling([1] * 64)
    processor.check_pooling("x y z " * 40)
    for bad in ([1] * 65, "x y z " * 4000):
        with pytest.raises(ContextLengthExceeded, match=r"^p: ") as caught:
            processor.check_pooling(bad, param="p")
        assert "is asked for" not in str(caught.value)
    with pytest.raises(InvalidParameter, match=r"^p: "):
        processor.check_pooling([512], param="p")


def test_seeds_may_be_left_to_the_engine(processor: InputProcessor) -> None:
    """A request without one keeps none, and one with its own keeps that."""
    assert not processor.process([1], SamplingParams(), KEY).request.params.has_seed
    assert processor.process([1], SamplingParams(seed=7), KEY).request.params.seed == 7
