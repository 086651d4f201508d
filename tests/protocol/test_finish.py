"""The one rule that ends an output."""

from tandem.protocol.outputs import Finish, FinishReason, finish_of
from tandem.protocol.sampling import SamplingParams

EOS = (2,)


def finish(params: SamplingParams, token: int, emitted: int = 5, prompt: int = 10) -> Finish | None:
    """The rule at one token, in a context of 100."""
    return finish_of(params, EOS, token, num_emitted=emitted, num_prompt=prompt, max_model_len=100)


def test_an_ordinary_token_goes_on() -> None:
    assert finish(SamplingParams(), 7) is None


def test_end_of_sequence_stops_unless_ignored() -> None:
    """The model's own end counts unless the client ignores it."""
    assert finish(SamplingParams(), 2) == Finish(FinishReason.STOP)
    assert finish(SamplingParams(ignore_eos=True), 2) is None


def test_a_stop_id_is_named() -> None:
    """The client learns which stop id it was."""
    assert finish(SamplingParams(stop_token_ids=(7,)), 7) == Finish(FinishReason.STOP, 7)


def test_nothing_stops_before_min_tokens() -> None:
    """A forced prefix may hold an end that does not count yet."""
    params = SamplingParams(min_tokens=6, stop_token_ids=(7,))

    assert finish(params, 2) is None
    assert finish(params, 7) is None
    assert finish(params, 7, emitted=6) == Finish(FinishReason.STOP, 7)


def test_length_is_max_tokens_or_the_context() -> None:
    """Both limits end with length; a stop at the limit is still a stop."""
    assert finish(SamplingParams(max_tokens=5), 7) == Finish(FinishReason.LENGTH)
    assert finish(SamplingParams(), 7, prompt=95) == Finish(FinishReason.LENGTH)
    assert finish(SamplingParams(max_tokens=5), 2) == Finish(FinishReason.STOP)
