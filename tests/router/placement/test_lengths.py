"""Workers with other limits each: no request is refused that one of them could serve.

What P may promise and what each worker can hold travel in the cards; where a request ends is said
in the request, so that both legs of a hand-off go by one rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.router.behaviours import ANSWER, Make, behind, has_read, refuse_with
from tests.router.builders import STRICT, Stack, make_request, tokens_of, view
from tests.router.fake_worker import Turn, serve_well
from tests.waiting import until

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import RefusalCode, RequestRefused
from tandem.protocol.outputs import FinishReason
from tandem.protocol.requests import Consume
from tandem.router.dispatch.retry_policy import NON_RETRYABLE, AttemptFailure
from tandem.router.placement import policy
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, PromptFacts, WorkerView

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def where(prompt: PromptFacts, *workers: WorkerView) -> tuple[int | None, int] | None:
    """(prefill, worker) that the policy takes, all of them linked."""
    pairs = [(p.incarnation, d.incarnation) for p in workers for d in workers]
    fleet = FleetSnapshot(workers, frozenset(pairs))
    placement = STRICT.place(prompt, fleet, Exclusions())
    if placement is None:
        return None
    number = int.from_bytes
    prefill = placement.prefill
    return None if prefill is None else number(prefill, "big"), number(placement.worker, "big")


def test_a_prompt_beyond_one_workers_quota_goes_by_another_or_whole() -> None:
    """P's limit is known before it is asked: another P is taken, else nobody hands over."""
    prompt = PromptFacts(num_tokens=1000)
    small, large = view(1, P, max_handoff_tokens=999), view(2, P, waiting_tokens=500)
    assert where(prompt, small, large, view(3, D)) == (2, 3)
    assert where(prompt, small, view(3, D)) == (None, 3)
    exact = view(1, P, max_handoff_tokens=1000)
    assert where(prompt, exact, view(3, D)) == (1, 3)
    one = PromptFacts(num_tokens=1000, one_token=True)
    assert where(one, small, view(3, D)) == (None, 1), "what it keeps to itself has no quota"


def test_a_prompt_goes_where_it_fits() -> None:
    """Shorter contexts are passed over, whichever part they would have."""
    prompt = PromptFacts(num_tokens=1000)
    assert where(prompt, view(1, D, max_model_len=1000), view(2, D, num_running=9)) == (None, 2)
    assert where(prompt, view(1, P, max_model_len=1000), view(3, D)) == (None, 3)
    assert where(prompt, view(1, D, max_model_len=1000)) is None


def test_what_was_asked_for_goes_where_all_of_it_fits() -> None:
    """A worker that would end it early is taken only where nobody holds it whole."""
    prompt = PromptFacts(num_tokens=100, max_new_tokens=900)
    short, long = view(1, D, max_model_len=999), view(2, D, max_model_len=1000, num_running=9)
    assert where(prompt, short, long) == (None, 2)
    assert where(prompt, short) == (None, 1)


def wait_for_kv(turn: Turn) -> Iterator[float]:
    """Nothing without the KV that was promised; a request of its own is served."""
    if isinstance(turn.request.kv, Consume):
        turn.accept()
        yield 60.0
    else:
        yield from serve_well(turn)


async def test_never_fits_from_a_producer_is_no_word_on_the_request(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """Two prefill workers whose cards said nothing refuse: the decode worker does all of it."""
    refusing = refuse_with(RefusalCode.NEVER_FITS)
    p1, p2 = prefill(behaviour=refusing), prefill(behaviour=refusing)
    d = decode(behaviour=wait_for_kv)
    await stack.find(p1, p2, d)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert len(p1.submitted) == len(p2.submitted) == 1
    assert d.submitted[-1].kv is None


async def test_a_consumer_that_cannot_take_over_computes(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """UNSUPPORTED of a decode leg speaks of the hand-off: the same worker is asked for all."""

    def alone(turn: Turn) -> Iterator[float]:
        if isinstance(turn.request.kv, Consume):
            yield from refuse_with(RefusalCode.UNSUPPORTED)(turn)
        else:
            yield from serve_well(turn)

    p, d = prefill(step=0.05), decode(behaviour=alone)
    await stack.find(p, d)
    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert [type(each.kv).__name__ for each in d.submitted] == ["Consume", "NoneType"]


async def test_a_worker_that_is_too_short_does_not_speak_for_the_others(
    stack: Stack, decode: Make
) -> None:
    """NEVER_FITS of one decode worker: the next is asked; the client hears it when all said so."""
    short = decode(behaviour=refuse_with(RefusalCode.NEVER_FITS))
    await stack.find(short)
    with pytest.raises(RequestRefused) as caught:
        await stack.run(make_request())
    assert caught.value.refusal.code is RefusalCode.NEVER_FITS

    long = decode()
    await stack.find(short, long)
    for _ in range(4):
        assert tokens_of(await stack.run(make_request())) == ANSWER


async def test_both_legs_hear_where_the_request_ends(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """It is the decode worker's limit, which is not that of the prefill worker."""
    p, d = prefill(max_model_len=41), decode(max_model_len=45)
    await stack.find(p, d)

    outputs = await stack.run(make_request(40, max_tokens=30))
    await until(lambda: p.submitted)
    assert (p.submitted[0].max_model_len, d.submitted[0].max_model_len) == (45, 45)
    assert tokens_of(outputs) == ANSWER[:5]
    assert outputs[-1].finish is FinishReason.LENGTH


async def test_the_longest_context_is_what_clients_are_held_to(stack: Stack, decode: Make) -> None:
    """What one worker could serve is no client's error because another could not."""
    short, long = decode(max_model_len=1024), decode(max_model_len=4096)
    await stack.find(short, long)
    assert (await stack.dispatcher.describe()).max_model_len == 4096
    for _ in range(3):
        await stack.run(make_request(1500))
    assert (len(short.submitted), len(long.submitted)) == (0, 3)


def never_fits_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was: nobody knows P's limit, and its no is the client's answer."""
    monkeypatch.setattr(policy, "may_hand_over", lambda prompt, worker: True)
    monkeypatch.setattr(
        "tandem.router.dispatch.retry_policy.NON_RETRYABLE",
        NON_RETRYABLE | {RefusalCode.NEVER_FITS},
    )
    monkeypatch.setattr(AttemptFailure, "of_handoff", False)


def refuse_large(turn: Turn) -> Iterator[float]:
    if turn.request.kv is not None and len(turn.request.prompt_token_ids) > 30:
        yield from refuse_with(RefusalCode.NEVER_FITS)(turn)
    else:
        yield from serve_well(turn)


@pytest.mark.parametrize("mutant", [False, True], ids=["as it is", "as it was"])
async def test_every_prompt_that_fits_somewhere_is_served(
    stack: Stack, prefill: Make, decode: Make, monkeypatch: pytest.MonkeyPatch, mutant: bool
) -> None:
    """Prompts of all lengths up to the context of D, beside a P with a small quota."""

    def after_p(turn: Turn) -> Iterator[float]:
        handed_over = isinstance(turn.request.kv, Consume)
        yield from (behind(has_read(stack)) if handed_over else serve_well)(turn)

    p = prefill(behaviour=refuse_large, max_handoff_tokens=30)
    d = decode(max_model_len=60, behaviour=after_p)
    await stack.find(p, d)
    if mutant:
        never_fits_is_final(monkeypatch)
    refused = []
    for count in range(18, 60, 6):
        await stack.known(p, d)
        try:
            assert len(await stack.run(make_request(count, max_tokens=2))) > 0
        except RequestRefused as error:
            refused.append((count, error.refusal.code))
    assert bool(refused) is mutant
    asked = max(len(each.prompt_token_ids) for each in p.submitted)
    assert (asked > 30) is mutant
