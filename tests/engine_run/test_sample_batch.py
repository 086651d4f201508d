"""A row's token is its own: whatever the batch around it, its order, and who samples."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine_run.sample_builders import Row, batch_of, put, random_logits, sample, tokens_of

from tandem.engine.sample import Sampler, SamplingBatch, rules
from tandem.engine.sample.bounds import AllowedTokens
from tandem.engine.sample.seen import PromptTokens
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

VOCABULARY = 1000


def many_rows(count: int) -> list[Row]:
    """Rows that ask for every kind of thing, alone and together."""
    pick = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.5, "top_k": 20},
        {"top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2, "top_k": 50},
        {"allowed_token_ids": tuple(range(50, 90)), "logprobs": 0},
        {"bad_words_token_ids": ((4,), (1, 2)), "min_tokens": 3, "logit_bias": {7: 5.0}},
    ]
    return [
        Row(
            SamplingParams(seed=pick.randrange(-(2**63), 2**63), **kinds[at % len(kinds)]),
            prompt=pick.choices(range(VOCABULARY), k=20),
            output=pick.choices(range(VOCABULARY), k=pick.randrange(6)),
            eos=(2,),
        )
        for at in range(count)
    ]


def test_neighbours_do_not_matter():
    """Each row of a big mixed batch draws what it draws alone."""
    rows, logits = many_rows(80), random_logits(80, VOCABULARY)
    together = sample(logits, rows)
    scores = together.logprobs.by_draw() if together.logprobs else {}
    for at, row in enumerate(rows):
        alone = sample(logits[at : at + 1], [row])
        assert int(alone.token_ids[0]) == int(together.token_ids[at])
        if alone.logprobs is not None:
            mine, other = alone.logprobs.as_list()[0], scores[at]
            assert (mine.token_id, mine.rank, mine.top_ids) == (
                other.token_id,
                other.rank,
                other.top_ids,
            )
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_order_does_not_matter():
    """A batch in another order draws the same tokens in that order."""
    rows, logits = many_rows(40), random_logits(40, VOCABULARY)
    order = random.Random(1).sample(range(40), 40)
    drawn = tokens_of(logits, rows)
    assert tokens_of(logits[order], [rows[at] for at in order]) == [drawn[at] for at in order]


def test_any_part_of_a_batch_may_step():
    """A step may sample some rows of a batch, in any order of them."""
    rows, logits = many_rows(16), random_logits(16, VOCABULARY)
    drawn, batch, part = tokens_of(logits, rows), batch_of(rows), [9, 3, 12]
    out = Sampler(VOCABULARY).sample(
        logits[part],
        batch,
        rows=part,
        positions=[len(rows[at].output) for at in part],
        choices=[(0,)] * 3,
    )
    assert out.token_ids.tolist() == [drawn[at] for at in part]


def test_choices_from_one_row_are_the_choices_alone():
    """n choices drawn from one row of logits are what each would draw from its own copy."""
    rows, logits = many_rows(8), random_logits(8, VOCABULARY)
    wide = [replace(row, choices=(0, 3, 1)[: at % 4]) for at, row in enumerate(rows)]
    out = sample(logits, wide)
    alone = [
        int(sample(logits[at : at + 1], [replace(row, choices=(choice,))]).token_ids[0])
        for at, row in enumerate(wide)
        for choice in row.choices
    ]
    assert out.token_ids.tolist() == alone
    assert out.logprobs is not None
    assert (out.logprobs.draws, out.logprobs.counts) == ((7, 8), (0, 0))


def test_resumed_sequence_goes_on_as_before():
    """A row that another worker builds from prompt and emitted tokens draws the same next token."""
    logits = random_logits(6, VOCABULARY)
    for row in many_rows(8):
        first = batch_of([row])
        said = list(row.output)
        for step in range(6):
            if step == 3:
                first = batch_of([replace(row, output=said)], spare=2)
            (token,) = one_step(first, logits[step], len(said))
            first.extend(0, [token])
            said.append(token)
        assert said == straight(row, logits)


def straight(row: Row, logits: torch.Tensor) -> list[int]:
    """The output of a sequence that nobody interrupts."""
    batch, said = batch_of([row]), list(row.output)
    for step in logits:
        said += one_step(batch, step, len(said))
        batch.extend(0, said[-1:])
    return said


def one_step(batch: SamplingBatch, logits: torch.Tensor, position: int) -> list[int]:
    """Row 0 of a batch draws choice 0."""
    sampler = Sampler(VOCABULARY)
    out = sampler.sample(logits.unsqueeze(0), batch, rows=[0], positions=[position], choices=[(0,)])
    return [int(token) for token in out.token_ids]


def test_reused_row_forgets():
    """A row that is given to another sequence keeps nothing of the one before."""
    rows, logits = many_rows(8), random_logits(8, VOCABULARY)
    drawn = tokens_of(logits, rows)
    batch = batch_of(rows)
    for before in rows:
        for at in range(8):
            put(batch, at, before)
        for at, row in enumerate(rows):
            put(batch, at, row)
        out = Sampler(VOCABULARY).sample(
            logits,
            batch,
            rows=range(8),
            positions=[len(row.output) for row in rows],
            choices=[(0,)] * 8,
        )
        assert out.token_ids.tolist() == drawn
    for at in range(8):
        batch.remove(at)
        batch.remove(at)
    assert not batch.kinds.any()
    assert [*batch.rules, *batch.logprobs] == []


def test_choices_of_a_request_share_what_never_changes(monkeypatch: pytest.MonkeyPatch):
    """Ids of the prompt and allowed ones are looked through once, not for each of its choices; what
    a choice says is its own."""
    made: list[type] = []

    def noted(kind: type) -> Callable[[Any], Any]:
        def make(ids: Any) -> Any:
            made.append(kind)
            return kind(ids)

        return make

    for kind in (PromptTokens, AllowedTokens):
        monkeypatch.setattr(rules, kind.__name__, noted(kind))
    params = SamplingParams(
        seed=1, repetition_penalty=1.3, frequency_penalty=0.5, allowed_token_ids=tuple(range(900))
    )
    rows = [Row(params, prompt=list(range(500)), output=[at]) for at in range(8)]
    batch = batch_of(rows, spare=1)
    assert made == [AllowedTokens, PromptTokens]
    batch.extend(3, [7, 7])
    counts = [each.seen.counts.tolist() for each in batch.rules.values() if each.seen]
    assert counts == [[1.0]] * 3 + [[1.0, 2.0]] + [[1.0]] * 4
    rows[3].output = [3, 7, 7]
    logits = random_logits(1, VOCABULARY).expand(8, -1)
    alone = [int(sample(logits[:1], [row]).token_ids[0]) for row in rows]
    drawn = Sampler(VOCABULARY).sample(
        logits,
        batch,
        rows=range(8),
        positions=[len(row.output) for row in rows],
        choices=[(0,)] * 8,
    )
    assert drawn.token_ids.tolist() == alone

    made.clear()
    put(batch, 8, replace(rows[0], prompt=list(range(1, 501))))  # of another prompt
    for at in range(9):
        batch.remove(at)
    put(batch, 0, rows[0])  # nothing is kept of requests that are gone
    assert made == [AllowedTokens, PromptTokens] * 2


def test_padding_of_the_vocabulary_is_never_drawn():
    """Logits beyond the vocabulary are no tokens, however large."""
    logits = torch.zeros(2, 20)
    logits[:, 12:] = 99.0
    rows = [Row(SamplingParams(temperature=0)), Row(SamplingParams(seed=1, logprobs=12))]
    out = Sampler(12).sample(
        logits, batch_of(rows), rows=[0, 1], positions=[0, 0], choices=[(0,), (0,)]
    )
    assert max(out.token_ids.tolist()) < 12
    assert out.logprobs is not None
    assert sorted(out.logprobs.as_list()[0].top_ids) == list(range(12))


def test_only_rows_that_look_back_wait_for_their_tokens():
    """Penalties and longer bad words need the last token on the host; nothing else does."""
    looks_back: list[dict[str, Any]] = [
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"bad_words_token_ids": ((1, 2),)},
    ]
    others: list[dict[str, Any]] = [
        {},
        {"min_tokens": 3},
        {"bad_words_token_ids": ((1,),)},
        {"logit_bias": {1: 1.0}},
    ]
    rows = [Row(SamplingParams(seed=1, **asks), eos=(1,)) for asks in (*looks_back, *others)]
    batch = batch_of(rows)
    assert [batch.needs_tokens(row) for row in range(7)] == [True] * 3 + [False] * 4


def test_drawing_without_a_seed_is_refused():
    """A draw that could not be repeated elsewhere is not made; greedy needs no seed."""
    batch = SamplingBatch(1)
    for none in (None, -1):
        with pytest.raises(InvalidParameter, match="seed"):
            batch.add(0, SamplingParams(seed=none), token_ids=[], num_prompt=0)
    batch.add(0, SamplingParams(temperature=0), token_ids=[], num_prompt=0)
    assert not batch.kinds.any()


def test_empty_step_draws_nothing():
    out = Sampler(5).sample(torch.zeros(0, 5), SamplingBatch(1), rows=[], positions=[], choices=[])
    assert out.token_ids.shape == (0,)
    assert out.logprobs is None
