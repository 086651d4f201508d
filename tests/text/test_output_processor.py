"""Tokens become what clients see: text, stop strings, log-probabilities, counts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput, FinishReason, TokenLogprobs
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import OutputKind, SamplingParams
from tandem.protocol.structured import StructuredOutputsParams
from tandem.text.input_processor import ProcessedInput
from tandem.text.output_processor import (
    ChoiceState,
    CompletionOutput,
    OutputProcessor,
    RequestState,
)
from tandem.text.pieces import StopMatcher
from tandem.text.tokenizer import Tokenizer


def begin(tokenizer: Tokenizer, **params: Any) -> RequestState:
    """The state of a request with a prompt of three tokens; DELTA unless told otherwise."""
    fields = {"output_kind": OutputKind.DELTA, **params}
    request = EngineCoreRequest(
        key=RequestKey(b"", "r", 0),
        prompt_token_ids=[3, 4, 5],
        params=SamplingParams(**fields),
    )
    return OutputProcessor(tokenizer).begin(ProcessedInput(request=request, prompt="p"))


def step(position: int, ids: Sequence[int], choice: int = 0, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput("r", 0, choice, position, tuple(ids), **fields)


def feed_all(
    state: RequestState, ids: Sequence[int], borders: Sequence[int] = (), **last: Any
) -> list[CompletionOutput]:
    """Feed ids cut at ``borders``, the last piece with the fields of ``last``."""
    cuts = sorted({border % (len(ids) + 1) for border in borders} | {0, len(ids)})
    shown: list[CompletionOutput] = []
    for start, end in pairwise(cuts):
        fields = last if end == len(ids) else {}
        shown += state.feed(step(start, ids[start:end], **fields))
    return shown


def text_of(shown: Sequence[CompletionOutput]) -> str:
    return "".join(each.text for each in shown)


def test_deltas_add_up_and_the_last_says_why(byte_level: Tokenizer) -> None:
    """Texts, tokens, counts, and the finish of the engine."""
    ids = byte_level.encode("naïve 😀 café")
    state = begin(byte_level)

    shown = feed_all(state, ids, range(len(ids)), finish=FinishReason.LENGTH, num_cached_tokens=2)

    assert text_of(shown) == "naïve 😀 café"
    assert [token for each in shown for token in each.token_ids] == ids
    assert [each.finish_reason for each in shown[:-1]] == [None] * (len(ids) - 1)
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == (FinishReason.LENGTH, None)
    assert shown[-1].finished()
    assert (state.finished, state.must_abort) == (True, False)
    assert (state.num_prompt_tokens, state.num_cached_tokens) == (3, 2)
    assert state.num_generated_tokens == len(ids)


def test_the_end_token_counts_but_is_not_shown(byte_level: Tokenizer) -> None:
    """End-of-sequence and stop ids leave no text, even where special tokens are spelled."""
    end = byte_level.token_id("<|end|>")
    stop = byte_level.token_id("the")
    assert end is not None
    assert stop is not None

    by_end = begin(byte_level, skip_special_tokens=False)
    shown = by_end.feed(step(0, [stop, end], finish=FinishReason.STOP))
    assert (shown[0].text, shown[0].token_ids, shown[0].stop_reason) == ("the", (stop, end), None)

    by_id = begin(byte_level)
    shown = by_id.feed(step(0, [stop], finish=FinishReason.STOP, stop_token=stop))
    assert (shown[0].text, shown[0].stop_reason) == ("", stop)
    assert by_id.num_generated_tokens == 1

    kept = begin(byte_level, include_stop_str_in_output=True)
    shown = kept.feed(step(0, [stop], finish=FinishReason.STOP, stop_token=stop))
    assert shown[0].text == "the"


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_stop_strings_end_the_text_whatever_the_steps(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    """Any ids in any steps give the text that the whole would give, and the tokens up to it."""
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), min_size=1, max_size=30))
    stops = data.draw(st.lists(st.text("the o\ufffd<", min_size=1, max_size=3), max_size=3))
    borders = data.draw(st.lists(st.integers(0, 40), max_size=10))
    include = data.draw(st.booleans())
    state = begin(byte_level, stop=tuple(stops), include_stop_str_in_output=include)

    shown = feed_all(state, ids, borders, finish=FinishReason.LENGTH)

    whole = StopMatcher(stops, include=include)
    expected = whole.feed(byte_level.decode(ids))
    if whole.found is None:
        expected += whole.end()
    reason = FinishReason.LENGTH if whole.found is None else FinishReason.STOP
    assert text_of(shown) == expected
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == (reason, whole.found)
    taken = [token for each in shown for token in each.token_ids]
    assert taken == ids[: len(taken)]
    assert state.num_generated_tokens == len(taken)


def test_tokens_after_a_stop_string_are_dropped(byte_level: Tokenizer) -> None:
    """In the same step, and in every later one; the engine is to be told."""
    ids = byte_level.encode("the dog. the fox")
    upto = len(byte_level.encode("the dog."))
    state = begin(byte_level, stop=(".",), logprobs=0)
    logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in ids)

    shown = state.feed(step(0, ids, logprobs=logprobs))

    assert (shown[0].text, shown[0].stop_reason) == ("the dog", ".")
    assert list(shown[0].token_ids) == ids[:upto]
    assert len(shown[0].logprobs or ()) == upto
    assert shown[0].cumulative_logprob == -upto
    assert (state.finished, state.must_abort) == (True, True)
    assert state.feed(step(len(ids), ids, finish=FinishReason.LENGTH)) == []
    assert state.must_abort is False
    assert state.num_generated_tokens == upto


def test_a_stop_string_before_the_end_token_wins(byte_level: Tokenizer) -> None:
    """The tokens behind it, the end token too, are not the answer's."""
    dot = byte_level.encode("dog.")
    end = byte_level.eos_token_ids[0]
    state = begin(byte_level, stop=(".",))

    shown = state.feed(step(0, [*dot, end], finish=FinishReason.STOP))

    assert (shown[0].text, shown[0].stop_reason) == ("dog", ".")
    assert list(shown[0].token_ids) == dot
    assert state.must_abort is False


def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer) -> None:
    """A stop string within the first tokens is text; the token that reaches the minimum counts."""
    ids = byte_level.encode("....", add_special_tokens=False)
    assert len(ids) == 4

    shown = feed_all(begin(byte_level, stop=(".",), min_tokens=3), ids, range(4))

    assert text_of(shown) == ".."
    assert sum(len(each.token_ids) for each in shown) == 3


def test_held_back_text_comes_with_the_end(byte_level: Tokenizer) -> None:
    """What might have become a stop string is shown when nothing follows."""
    state = begin(byte_level, stop=("dog\n\n",))
    ids = byte_level.encode("the dog\n")

    first = feed_all(state, ids)
    end = state.feed(step(len(ids), [], finish=FinishReason.ABORT))

    assert text_of(first) == "the "
    assert (end[0].text, end[0].finish_reason) == ("dog\n", FinishReason.ABORT)


def test_half_a_character_at_the_end_may_be_a_stop_string(byte_level: Tokenizer) -> None:
    """The rule holds for the last replacement too."""
    half = byte_level.encode("😀")[:-1]
    state = begin(byte_level, stop=("\ufffd",))

    shown = state.feed(step(0, half, finish=FinishReason.LENGTH))

    assert (shown[0].text, shown[0].finish_reason) == ("", FinishReason.STOP)
    assert list(shown[0].token_ids) == half


def test_choices_end_one_by_one(byte_level: Tokenizer) -> None:
    """A stop string ends its own choice; what the engine still sends of it is dropped."""
    word, dot = byte_level.encode("the"), byte_level.encode(".")
    state = begin(byte_level, n=2, stop=(".",))

    assert state.feed(step(0, dot, choice=1))[0].index == 1
    assert not state.finished
    assert state.feed(step(1, word, choice=1)) == []
    assert state.feed(step(0, word, choice=0))[0].text == "the"
    assert state.feed(step(2, word, choice=1, finish=FinishReason.LENGTH)) == []
    last = state.feed(step(1, word, choice=0, finish=FinishReason.LENGTH))

    assert (last[0].text, last[0].finish_reason) == ("the", FinishReason.LENGTH)
    assert (state.finished, state.must_abort) == (True, False)
    assert state.num_generated_tokens == 3


def test_cumulative_outputs_hold_everything_so_far(byte_level: Tokenizer) -> None:
    """Each is a whole of its own, not a view that grows."""
    ids = byte_level.encode("the dog")
    state = begin(byte_level, output_kind=OutputKind.CUMULATIVE, logprobs=1)

    shown = []
    for position, token in enumerate(ids):
        logprobs = (TokenLogprobs(token, -0.5, 2, (7,), (-0.25,)),)
        shown += state.feed(step(position, [token], logprobs=logprobs))

    assert [len(each.token_ids) for each in shown] == list(range(1, len(ids) + 1))
    assert [len(each.logprobs or ()) for each in shown] == list(range(1, len(ids) + 1))
    assert shown[-1].text == "the dog"
    assert shown[-1].cumulative_logprob == pytest.approx(-0.5 * len(ids))


def test_final_outputs_come_once_with_every_choice(byte_level: Tokenizer) -> None:
    word, dot = byte_level.encode("the"), byte_level.encode(".")
    state = begin(byte_level, n=2, output_kind=OutputKind.FINAL_ONLY)

    assert state.feed(step(0, word, choice=1)) == []
    assert state.feed(step(1, dot, choice=1, finish=FinishReason.LENGTH)) == []
    final = state.feed(step(0, dot, choice=0, finish=FinishReason.STOP))

    assert [each.text for each in final] == ["", "the."]
    assert [each.finish_reason for each in final] == [FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_shown_once_is_copied_once(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """A copy of all that came is made of each choice at the end, not at each of its tokens."""
    copied: list[int] = []
    snapshot = ChoiceState.snapshot

    def counted(choice: ChoiceState) -> CompletionOutput:
        copied.append(choice.index)
        return snapshot(choice)

    monkeypatch.setattr(ChoiceState, "snapshot", counted)
    ids = byte_level.encode("the dog sees the other dog")
    state = begin(byte_level, n=2, output_kind=OutputKind.FINAL_ONLY, logprobs=1)
    shown: list[CompletionOutput] = []
    for choice in (0, 1):
        for position, token in enumerate(ids):
            logprobs = (TokenLogprobs(token, -0.5, 2, (7,), (-0.25,)),)
            ends = not cut and position == len(ids) - 1
            finish = FinishReason.LENGTH if ends else None
            shown += state.feed(step(position, [token], choice, logprobs=logprobs, finish=finish))
    shown += state.cut() if cut else []

    assert copied == [0, 1]
    assert [each.text for each in shown] == ["the dog sees the other dog"] * 2
    assert [len(each.logprobs or ()) for each in shown] == [len(ids)] * 2


def test_without_detokenizing_there_are_only_ids(byte_level: Tokenizer) -> None:
    """``detokenize=false`` costs no text and shows none."""
    state = begin(byte_level, detokenize=False)

    shown = state.feed(step(0, [5, 6], finish=FinishReason.LENGTH))

    assert (shown[0].text, shown[0].token_ids) == ("", (5, 6))


def test_an_output_without_tokens_shows_nothing(byte_level: Tokenizer) -> None:
    """Prompt logprobs may come before the first token."""
    state = begin(byte_level, prompt_logprobs=1)
    positions = (None, TokenLogprobs(4, -2.0, 9, (3,), (-0.1,)), TokenLogprobs(5, -0.2, 1))

    assert state.feed(step(0, [], prompt_logprobs=positions)) == []

    assert state.prompt_logprobs is not None
    assert state.prompt_logprobs[0] is None
    second = state.prompt_logprobs[1]
    assert second is not None
    assert second.sampled.rank == 9
    assert [each.token_id for each in second.top] == [3]


def test_logprobs_have_text_bytes_and_rank(byte_level: Tokenizer) -> None:
    """Sampled and best tokens by id, as vLLM has them, and in order, as OpenAI shows them."""
    half = byte_level.encode("😀")[0]
    dog = byte_level.encode("dog")[0]
    state = begin(byte_level, logprobs=2)
    position = TokenLogprobs(half, -3.0, 17, (dog, 3), (-0.1, -0.2))

    shown = state.feed(step(0, [half], logprobs=(position,)))

    found = (shown[0].logprobs or ())[0]
    assert found.sampled.bytes == byte_level.token_bytes(half)
    assert found.sampled.decoded_token == "\ufffd"
    assert list(found) == [half, dog, 3]
    assert len(found) == 3
    assert (found[half].rank, found[dog].rank, found[3].rank) == (17, 1, 2)
    assert found[dog].logprob == -0.1
    assert 99 not in found
    assert "rank=17" in repr(found)


def test_the_sampled_token_among_the_best_is_one_entry(byte_level: Tokenizer) -> None:
    """A mapping has each id once."""
    state = begin(byte_level, logprobs=1)

    shown = state.feed(step(0, [3], logprobs=(TokenLogprobs(3, -0.1, 1, (3,), (-0.1,)),)))

    assert list((shown[0].logprobs or ())[0]) == [3]


def test_an_engine_that_leaves_out_logprobs_is_borne(byte_level: Tokenizer) -> None:
    """A forced token of a resumed request has none."""
    state = begin(byte_level, logprobs=1, output_kind=OutputKind.CUMULATIVE)

    shown = state.feed(step(0, [3]))

    assert shown[0].logprobs == []


@pytest.mark.parametrize("include", [False, True])
def test_a_complete_answer_keeps_its_last_token(byte_level: Tokenizer, include: bool) -> None:
    """Under a grammar the last token belongs to the text, unless it is an end or a stop id."""
    wanted = StructuredOutputsParams(choice=["café"])
    ids = byte_level.encode("café")
    fields: dict[str, Any] = {
        "structured_outputs": wanted,
        "include_stop_str_in_output": include,
    }
    whole = feed_all(begin(byte_level, **fields), ids, finish=FinishReason.STOP)
    stopped = feed_all(
        begin(byte_level, **fields), ids, finish=FinishReason.STOP, stop_token=ids[-1]
    )
    free = feed_all(
        begin(byte_level, include_stop_str_in_output=include), ids, finish=FinishReason.STOP
    )

    assert text_of(whole) == "café"
    assert text_of(stopped) == text_of(free)
    assert (text_of(free) == "café") is include


def test_behind_a_prompt_of_embeddings_words_keep_their_space(word_piece: Tokenizer) -> None:
    """Its tokens are not known, placeholders say nothing: the text is as behind any word."""
    ids = word_piece.encode("the dog", add_special_tokens=False)
    texts = []
    for embeds in (PromptEmbeds("float16", 1, bytes(6)), None):
        request = EngineCoreRequest(
            key=RequestKey(b"", "r", 0),
            prompt_token_ids=[0, 0, 0] if embeds is not None else ids,
            prompt_embeds=embeds,
            params=SamplingParams(output_kind=OutputKind.DELTA),
        )
        state = OutputProcessor(word_piece).begin(ProcessedInput(request=request, prompt=None))
        texts.append(text_of(feed_all(state, ids, finish=FinishReason.LENGTH)))
    assert texts[0] == texts[1]
    assert texts[0].startswith(" ")
