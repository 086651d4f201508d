"""What a client asks becomes a request that a worker can take, or an error that names the field."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.protocol.card import ModelCard
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.structured import ReasoningSpan
from tandem.text.chat_template import ChatOptions
from tandem.text.errors import ContextLengthExceeded
from tandem.text.folder import TokenizerSettings
from tandem.text.input_processor import (
    WHOLE_CONTEXT,
    InputOptions,
    InputProcessor,
    TruncationSide,
)
from tandem.text.tokenizer import Tokenizer

KEY = RequestKey(Incarnation(bytes(16)), "r1", 0)
MakeCard = Callable[..., ModelCard]


@pytest.fixture
def processor(byte_level: Tokenizer, make_card: MakeCard) -> InputProcessor:
    """For a context of 64 tokens and a vocabulary of 512; every drawn seed is 42."""
    return InputProcessor(byte_level, make_card(), draw_seed=lambda: 42)


def test_a_text_becomes_a_whole_request(processor: InputProcessor, byte_level: Tokenizer) -> None:
    """Ids, end ids, hashes of full blocks, the options, and the text for echo."""
    options = InputOptions(cache_salt="tenant", adapter="a", priority=3, budget_ms=900)

    processed = processor.process("the quick brown fox jumps", SamplingParams(), KEY, options)
    request = processed.request

    ids = byte_level.encode("the quick brown fox jumps")
    assert processed.prompt == "the quick brown fox jumps"
    assert (request.key, request.prompt_token_ids) == (KEY, ids)
    assert request.eos_token_ids == byte_level.eos_token_ids
    assert (request.cache_salt, request.adapter, request.priority) == ("tenant", "a", 3)
    assert (request.budget_ms, request.kv, request.emitted) == (900, None, ())
    root = root_hash(
        fingerprint=processor.card.fingerprint.digest, block_size=4, adapter="a", salt="tenant"
    )
    assert list(request.block_hashes) == hash_blocks(root, ids, 4)
    assert len(request.block_hashes) == len(ids) // 4


def test_ids_stay_as_they_are(processor: InputProcessor) -> None:
    """Nothing is added to ids, and there is no text unless the caller knows it."""
    processed = processor.process([5, 6, 7], SamplingParams(), KEY)

    assert processed.request.prompt_token_ids == [5, 6, 7]
    assert processed.prompt is None
    assert (
        processor.process({"prompt": "abc", "prompt_token_ids": [5]}, SamplingParams(), KEY).prompt
        == "abc"
    )


def test_a_chat_is_rendered_and_gets_no_second_bos(
    processor: InputProcessor, byte_level: Tokenizer
) -> None:
    """The template has written the special tokens already."""
    chat = [{"role": "user", "content": "hi"}]

    processed = processor.process_chat(chat, SamplingParams(), KEY)
    closed = processor.process_chat(
        chat, SamplingParams(), KEY, chat=ChatOptions(add_generation_prompt=False)
    )

    text = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert processed.prompt == text
    assert processed.request.prompt_token_ids == byte_level.encode(text, add_special_tokens=False)
    assert closed.prompt == "<|start|>user\nhi<|end|>\n"


@pytest.mark.parametrize(
    ("given", "chat", "expected"),
    [(None, False, True), (False, False, False), (None, True, False), (True, True, True)],
)
def test_special_tokens_are_added_to_texts_only_unless_asked(
    with_bos: Tokenizer, make_card: MakeCard, given: bool | None, chat: bool, expected: bool
) -> None:
    """A tokenizer that puts a BOS before a text does so for texts, and for chats on request."""
    processor = InputProcessor(with_bos, make_card())
    options = InputOptions(add_special_tokens=given)
    bare = ChatOptions(chat_template="{{ messages[0].content }}")
    messages = [{"role": "user", "content": "hi"}]

    processed = (
        processor.process_chat(messages, SamplingParams(), KEY, options, bare)
        if chat
        else processor.process("hi", SamplingParams(), KEY, options)
    )

    assert expected == (processed.request.prompt_token_ids[0] == with_bos.bos_token_id)


def test_a_missing_seed_is_drawn_and_a_given_one_kept(
    byte_level: Tokenizer, make_card: MakeCard
) -> None:
    """Every request has a seed, so that a second attempt draws what the first would have."""
    processor = InputProcessor(byte_level, make_card())
    seeds = {processor.process("a", SamplingParams(), KEY).request.params.seed for _ in range(8)}

    assert len(seeds) == 8
    assert None not in seeds
    assert processor.process("a", SamplingParams(seed=7), KEY).request.params.seed == 7


def test_max_tokens_defaults_to_what_the_context_holds(processor: InputProcessor) -> None:
    """64 tokens of context less the prompt."""
    assert processor.process([1] * 60, SamplingParams(), KEY).request.params.max_tokens == 4
    kept = processor.process([1] * 60, SamplingParams(max_tokens=2), KEY)
    assert kept.request.params.max_tokens == 2


@pytest.mark.parametrize(
    ("num_prompt", "params", "most"),
    [
        (10, SamplingParams(), 20),
        (60, SamplingParams(), 4),
        (10, SamplingParams(min_tokens=30), 30),
        (10, SamplingParams(max_tokens=40), 40),
        (10, SamplingParams(max_tokens=5), 5),
    ],
)
def test_a_default_bounds_what_nobody_else_does(
    processor: InputProcessor, num_prompt: int, params: SamplingParams, most: int
) -> None:
    """It gives way to the context, and to what the client says."""
    options = InputOptions(default_max_tokens=20)
    request = processor.process([1] * num_prompt, params, KEY, options).request
    assert request.params.max_tokens == most


def test_min_tokens_beyond_the_context_are_refused(processor: InputProcessor) -> None:
    """Whatever the default: there is no room."""
    options = InputOptions(default_max_tokens=20)
    with pytest.raises(InvalidParameter, match=r"min_tokens.*which is 54"):
        processor.process([1] * 10, SamplingParams(min_tokens=55), KEY, options)


def test_a_default_costs_no_prompt_its_beginning(processor: InputProcessor) -> None:
    options = InputOptions(default_max_tokens=20, truncate_prompt_tokens=WHOLE_CONTEXT)
    request = processor.process([1] * 100, SamplingParams(), KEY, options).request

    assert (len(request.prompt_token_ids), request.params.max_tokens) == (63, 1)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(64, None, "prompt"), (200, 16, "prompt"), (60, 5, "max_tokens")],
)
def test_what_does_not_fit_names_all_lengths(
    processor: InputProcessor, num_prompt: int, max_tokens: int | None, field: str
) -> None:
    """Prompt, answer and context, and the field that is to be made smaller."""
    with pytest.raises(ContextLengthExceeded) as caught:
        processor.process([1] * num_prompt, SamplingParams(max_tokens=max_tokens), KEY)

    error = caught.value
    assert error.param == field
    assert (error.num_prompt_tokens, error.max_tokens) == (num_prompt, max_tokens)
    asked = "at least one token" if max_tokens is None else f"max_tokens={max_tokens}"
    assert f"the prompt has {num_prompt} tokens and {asked} is asked for" in str(error)
    assert "maximum context length is 64 tokens" in str(error)


def test_an_oversized_text_is_refused_before_it_is_tokenized(processor: InputProcessor) -> None:
    """A text longer than the context times the longest token fits in no way."""
    with pytest.raises(ContextLengthExceeded, match="the prompt has at least ") as caught:
        processor.process("x " * 100_000, SamplingParams(), KEY)
    assert caught.value.num_prompt_tokens > 64

    with pytest.raises(ContextLengthExceeded, match=r"messages: .* prompt has at least "):
        processor.process_chat([{"role": "user", "content": "x " * 9999}], SamplingParams(), KEY)


def test_a_long_text_of_long_tokens_is_tokenized(processor: InputProcessor) -> None:
    """Length in characters alone refuses nothing that may fit."""
    added = "plain added token" * 20

    assert len(processor.process(added, SamplingParams(), KEY).request.prompt_token_ids) == 20


def test_what_a_tokenizer_drops_makes_no_text_too_long(
    word_piece: Tokenizer, make_card: MakeCard
) -> None:
    """Word pieces stand for words; spaces between them are nothing, however many there are."""
    processor = InputProcessor(word_piece, make_card(), draw_seed=lambda: 42)

    request = processor.process("the" + " " * 5000 + "quick", SamplingParams(), KEY).request

    assert len(request.prompt_token_ids) < 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [97, 98, 99]),
        ({"truncate_prompt_tokens": 3, "truncation_side": TruncationSide.RIGHT}, [0, 1, 2]),
        ({"truncate_prompt_tokens": -1}, list(range(46, 100))),
    ],
)
def test_long_prompts_are_cut_on_request(
    processor: InputProcessor, options: dict[str, Any], expected: list[int]
) -> None:
    """To a number, or to what fits beside the answer; the start goes first."""
    processed = processor.process(
        list(range(100)), SamplingParams(max_tokens=10), KEY, InputOptions(**options)
    )

    assert processed.request.prompt_token_ids == expected


def test_a_cut_text_may_be_of_any_length(processor: InputProcessor) -> None:
    """The early refusal is not for prompts that will be cut."""
    options = InputOptions(truncate_prompt_tokens=5)

    processed = processor.process("the dog " * 5000, SamplingParams(), KEY, options)

    assert len(processed.request.prompt_token_ids) == 5


@pytest.mark.parametrize("keep", [0, -2, 65, True])
def test_senseless_cuts_are_refused(processor: InputProcessor, keep: int) -> None:
    with pytest.raises(InvalidParameter, match=f"^truncate_prompt_tokens: {keep} "):
        processor.process([1], SamplingParams(), KEY, InputOptions(truncate_prompt_tokens=keep))


def test_bad_words_are_sent_in_both_spellings(
    processor: InputProcessor, byte_level: Tokenizer
) -> None:
    """At the start of a text and after a space; ids that the caller gave stay."""
    params = SamplingParams(bad_words=("dog", " fox", " "), bad_words_token_ids=((9, 9),))

    found = processor.process("a", params, KEY).request.params.bad_words_token_ids

    spelled = ["dog", " dog", "fox", " fox", " ", "  "]
    ids = [tuple(byte_level.encode(each, add_special_tokens=False)) for each in spelled]
    assert found == ((9, 9), *ids)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", {}, "prompt: .*at least one token"),
        ([], {}, "prompt: .*at least one token"),
        ([5, 512], {}, "prompt: 512 .*from 0 to 511"),
        ([-1], {}, "prompt: -1 "),
        ("\ud800", {}, "prompt: .*Unicode"),
        ("a", {"logprobs": 6}, "logprobs: 6 .*0 to 5"),
        ("a", {"stop_token_ids": (512,)}, "stop_token_ids: 512"),
        ("a", {"logit_bias": {700: 1.0}}, "logit_bias"),
        ("a", {"stop": ("x" * 2000,)}, "stop"),
        ("a", {"stop": ("x",), "detokenize": False}, "stop: .*detokenize=true"),
        ("a", {"bad_words": ("\ud800",)}, "bad_words"),
        ("a", {"min_tokens": 64}, "min_tokens: 64 .*at most max_tokens, which is 63"),
    ],
)
def test_what_no_worker_should_see_is_refused(
    processor: InputProcessor, prompt: Any, params: dict[str, Any], field: str
) -> None:
    """Prompt, ranges, vocabulary and counts, each by its field."""
    with pytest.raises(InvalidParameter, match=f"^{field}"):
        processor.process(prompt, SamplingParams(**params), KEY)


def test_end_ids_beyond_the_models_vocabulary_are_left_out(
    byte_level: Tokenizer, make_card: MakeCard
) -> None:
    """A folder may name ids that its model cannot draw."""
    settings = TokenizerSettings(eos_token_ids=(1, 9_999))
    tokenizer = Tokenizer(byte_level._backend, settings)

    request = InputProcessor(tokenizer, make_card()).process("a", SamplingParams(), KEY).request

    assert request.eos_token_ids == (1,)


def test_a_thought_is_bounded_where_its_end_is_known(
    byte_level: Tokenizer, make_card: MakeCard
) -> None:
    processor = InputProcessor(byte_level, make_card())
    budget = SamplingParams(thinking_token_budget=3)
    one = next(
        text for text in "abc" if len(byte_level.encode(text, add_special_tokens=False)) == 1
    )

    def of(close: str, opens: tuple[str, ...] = (), **options: Any) -> Any:
        span = ReasoningSpan(opens=opens, close=close)
        given = InputOptions(reasoning=lambda _: span, **options)
        return processor.process("hello", budget, KEY, given).request.params.thinking

    (close,) = byte_level.encode(one, add_special_tokens=False)
    begun = of(one, thinks=True)
    assert (begun.close, begun.opens, begun.has_begun) == (close, (), True)
    assert not of(one, ("xyz",), thinks=True).has_begun
    for wrong in (lambda: of(one), lambda: of("</never-one-token>", thinks=True)):
        with pytest.raises(InvalidParameter, match="thinking_token_budget: 3 is not allowed; -1"):
            wrong()
    with pytest.raises(InvalidParameter, match="thinking_token_budget"):
        processor.process("hello", budget, KEY)
