"""Prompts that are pooled are prepared together, as each would be alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from tandem.protocol.card import ModelCard
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.pooling import ModelPooling, PoolingParams
from tandem.protocol.requests import check_token_ids
from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.input_processor import InputOptions, InputProcessor, ProcessedInput
from tandem.text.prompts import PromptLike, parse_prompt
from tandem.text.tokenizer import Tokenizer

MakeCard = Callable[..., ModelCard]
EMBED = PoolingParams().verify()


def key_of(number: int) -> RequestKey:
    return RequestKey(Incarnation(bytes(16)), f"r{number}", 0)


def processed(
    processor: InputProcessor, prompts: Sequence[PromptLike], **options: Any
) -> list[ProcessedInput]:
    keys = [key_of(number) for number in range(len(prompts))]
    names = [f"input[{number}]" for number in range(len(prompts))]
    chosen = InputOptions(**options)
    return processor.process_all_pooling(prompts, EMBED, keys, chosen, names=names)


@pytest.fixture
def processor(with_bos: Tokenizer, make_card: MakeCard) -> InputProcessor:
    """For a context of 64 tokens, with a token that goes before texts."""
    return InputProcessor(with_bos, make_card(pooling=ModelPooling()))


@pytest.mark.parametrize("special", [None, True, False])
@pytest.mark.parametrize("cut", [None, 3, -1])
def test_a_batch_is_what_each_would_be_alone(
    processor: InputProcessor, special: bool | None, cut: int | None
) -> None:
    """Texts and ids mixed, in order; texts with the tokenizer's own tokens, ids without."""
    prompts: list[PromptLike] = ["the quick brown fox", [5, 6, 7, 8, 9], "a", "jumps " * 9]
    options: dict[str, Any] = {"add_special_tokens": special, "truncate_prompt_tokens": cut}

    found = processed(processor, prompts, **options)

    for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        alone = processor.process(
            prompt, SamplingParams(temperature=0.0, max_tokens=1, seed=1), key_of(number)
        )
        if special is not False and cut is None:
            assert one.request.prompt_token_ids == alone.request.prompt_token_ids
            assert one.request.block_hashes == alone.request.block_hashes
        (single,) = processor.process_all_pooling(
            [prompt], EMBED, [key_of(number)], InputOptions(**options)
        )
        assert single == one
        assert one.prompt == (prompt if isinstance(prompt, str) else None)
        assert one.request.key == key_of(number)


def test_what_is_pooled_needs_no_seed(processor: InputProcessor) -> None:
    (one,) = processed(processor, ["a"])
    assert one.request.params.seed is None


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ("\ud800", r"^input\[1\].*valid Unicode"),
        ([5, 700], r"^input\[1\]: 700 "),
        ([5, -1], r"^input\[1\]: -1 "),
        ([5, True], r"^input\[1\]: True "),
        ([5, 2.0], r"^input\[1\]: 2\.0 "),
        ([], r"^input\[1\]"),
        ("quick " * 4000, r"^input\[1\].* tokens"),
        ([5] * 65, r"^input\[1\].* 65 tokens"),
    ],
)
def test_the_one_that_is_refused_is_named(
    processor: InputProcessor, bad: PromptLike, match: str
) -> None:
    """Whatever stands beside it in the batch."""
    with pytest.raises(InvalidParameter, match=match):
        processed(processor, ["the quick", bad, "fox"])


def test_a_text_too_long_to_look_at_is_named(with_bos: Tokenizer, make_card: MakeCard) -> None:
    """The bound that a server sets holds in a batch, too."""
    tokenizer = Tokenizer(with_bos._backend)
    tokenizer.max_text_chars = 20
    processor = InputProcessor(tokenizer, make_card(pooling=ModelPooling()))
    with pytest.raises(InvalidParameter, match=r"^input\[1\].*at most 20 characters; it has 30"):
        processed(processor, ["fox", "jumps" * 6])


def test_a_texts_of_no_token_is_refused_as_a_text(processor: InputProcessor) -> None:
    with pytest.raises(InvalidParameter, match=r"^input\[0\].*at least one token") as refused:
        processed(processor, [""], add_special_tokens=False)
    assert refused.value.value == ""


def test_what_is_too_long_says_nothing_of_tokens_to_draw(processor: InputProcessor) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        processed(processor, [[5] * 80])
    assert "max_tokens" not in str(refused.value)


def test_prompts_are_hashed_where_somebody_caches_blocks(
    with_bos: Tokenizer, make_card: MakeCard
) -> None:
    for caches in (True, False):
        processor = InputProcessor(with_bos, make_card(pooling=None, prefix_caching=caches))
        (pooled,) = processed(processor, [[5] * 9])
        drawn = processor.process([5] * 9, SamplingParams(), key_of(0))
        expected = 2 if caches else 0
        assert len(pooled.request.block_hashes) == len(drawn.request.block_hashes) == expected


def test_a_card_that_says_nothing_of_caches_has_one(make_card: MakeCard) -> None:
    """A worker of an earlier build."""
    said = msgspec.to_builtins(make_card())
    del said["prefix_caching"]
    assert msgspec.convert(said, ModelCard).prefix_caching


class Whole(int):
    """A whole number, and more."""


def test_ids_are_looked_at_one_by_one_when_something_is_odd() -> None:
    """Then it is named if it is wrong, and taken if it is not."""
    check_token_ids("ids", [0, 9], 10)
    check_token_ids("ids", (3,), 10)
    check_token_ids("ids", range(10), 10)
    check_token_ids("ids", [Whole(3)], 10)
    check_token_ids("ids", [], 10)
    for wrong in ([1, 10, 11], [-1], range(11), [2**70]):
        with pytest.raises(InvalidParameter, match=r"^ids: .*token ids from 0 to 9"):
            check_token_ids("ids", wrong, 10)
    assert parse_prompt([Whole(3), 4]).token_ids == (3, 4)  # type: ignore[union-attr]
    assert parse_prompt(range(3)).token_ids == (0, 1, 2)  # type: ignore[union-attr]
