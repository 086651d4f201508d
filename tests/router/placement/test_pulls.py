"""Prefixes between peers: what placement makes of them, who is told, and which links there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.router.builders import Stack, beats, inc, make_request, view
from tests.router.placement.test_policy import MEASURED
from tests.waiting import until

from tandem.protocol.card import WorkerRole
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.messages import LoadReport
from tandem.protocol.outputs import BlockEvents
from tandem.protocol.requests import Produce, Pull
from tandem.router.placement.forecast import BUDGET_SECONDS, ROUND_SECONDS, Targets, best_pulls
from tandem.router.placement.policy import PlacementPolicy
from tandem.router.placement.rates import measured
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, LinkThroughput, PromptFacts
from tandem.router.tenant import NO_KEYS
from tandem.router.workers.pool import handoff_peers

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
FAST = LinkThroughput(10e9)
BYTES = 100_000.0
"""KV of a token."""


def fleet_of(
    throughput: LinkThroughput = FAST, *, busy: int = 0, **holder: object
) -> FleetSnapshot:
    """Two prefill workers, of which the first may have the prefix and queue, and a decode worker;
    the second calls the first to pull."""
    fields = {**MEASURED, "chunk_tokens": 2048, "token_bytes": BYTES}
    workers = (
        view(1, P, **{**fields, "waiting_tokens": busy, **holder}),
        view(2, P, **fields),
        view(3, D, **{**fields, "num_decoding": 50, "num_running": 50}),
    )
    links = frozenset({(inc(1), inc(3)), (inc(2), inc(3))})
    paces = {(inc(1), inc(2)): throughput}
    return FleetSnapshot(workers, links, paces, frozenset(paces))


def placed(prompt: PromptFacts, fleet: FleetSnapshot):
    policy = PlacementPolicy(Targets(0.3, 0.025), 0.1)
    placement = policy.place(prompt, fleet, Exclusions())
    assert placement is not None
    assert placement.forecast is not None
    return placement


def prompt_of(tokens: int, hits: dict[int, int], **fields: object) -> PromptFacts:
    """One with so many tokens cached at workers."""
    return PromptFacts(
        num_tokens=tokens,
        max_new_tokens=256,
        hits={inc(each): count for each, count in hits.items()},
        **fields,  # type: ignore[arg-type]
    )


def plans(prompt: PromptFacts, fleet: FleetSnapshot):
    known = measured(fleet.workers)
    assert known is not None
    rates = {each.incarnation: known.of(each) for each in fleet.workers}
    return best_pulls(prompt, fleet, rates)


def test_a_busy_holder_is_pulled_from() -> None:
    """P1 has the prefix and a queue: P2 gets the prompt, and pulls what P1 has."""
    prompt = prompt_of(8000, {1: 7984})
    placement = placed(prompt, fleet_of(busy=30_000))

    assert placement.prefill == inc(2)
    plan = placement.pull
    assert plan is not None
    assert (plan.holder, plan.num_tokens, plan.tokens) == (inc(1), 7984, 7984)
    assert plan.seconds < plan.compute_s
    assert "pulls 7984 tokens" in placement.rule
    ways = [(each.prefill, each.pull is not None) for each in placement.considered]
    assert (inc(2), True) in ways
    assert (inc(2), False) in ways, "computing it there is weighed, too"
    assert placement.hits_with_pull(prompt.hits)[inc(2)] == 7984


def test_an_idle_holder_computes_the_rest_itself() -> None:
    """What is cached where the prompt is computed need not come."""
    placement = placed(prompt_of(8000, {1: 7984}), fleet_of())
    assert placement.prefill == inc(1)
    assert placement.pull is None


@pytest.mark.parametrize(
    ("throughput", "pulls"),
    [
        (FAST, True),
        (LinkThroughput(0.0, 0, 10e9), True),
        (LinkThroughput(), False),
        (LinkThroughput(2e9), False),
        (LinkThroughput(10e9, 10_000_000_000), False),
    ],
    ids=["fast", "only its pattern is known", "unknown", "slower than computing", "others wait"],
)
def test_a_link_is_judged_by_what_it_did(throughput: LinkThroughput, pulls: bool) -> None:
    """800 MB are 80 ms over the fast link and 0.4 s over the slow one, and 0.17 s to compute."""
    found = plans(prompt_of(8001, {1: 8000}), fleet_of(throughput))
    assert (inc(2) in found) is pulls


def test_a_holder_in_the_middle_of_a_prompt_answers_after_its_step() -> None:
    """Which the forecast adds; the link's bytes, the round and the step are all of it."""
    prompt = prompt_of(8001, {1: 8000})
    idle, busy = plans(prompt, fleet_of())[inc(2)], plans(prompt, fleet_of(busy=9000))[inc(2)]
    assert idle.seconds == pytest.approx(8000 * BYTES / 10e9 + ROUND_SECONDS)
    assert busy.seconds - idle.seconds == pytest.approx(0.0445)


def test_only_what_is_missing_comes_and_the_last_token_never() -> None:
    """Of what the worker has itself nothing; a whole prompt's last block is computed."""
    found = plans(prompt_of(8000, {1: 8000, 2: 4000}), fleet_of())[inc(2)]
    assert (found.num_tokens, found.tokens) == (7984, 3984)
    assert not plans(prompt_of(8000, {1: 4000, 2: 4000}), fleet_of())
    assert not plans(prompt_of(8000, {1: 8000}, whole=True), fleet_of()), "its prompt is scored"


def test_of_several_holders_the_one_that_saves_most() -> None:
    """And never one of another fingerprint, or one that is not up."""
    fleet = fleet_of()
    links = {(inc(1), inc(2)): FAST, (inc(3), inc(2)): FAST, (inc(9), inc(2)): FAST}
    fleet = replace(fleet, paces=links, pull_links=frozenset(links))
    prompt = prompt_of(8000, {1: 2000, 3: 6000, 9: 7000})
    assert plans(prompt, fleet)[inc(2)].holder == inc(3)
    strange = tuple(
        replace(each, fingerprint="g") if each.incarnation == inc(3) else each
        for each in fleet.workers
    )
    assert plans(prompt, replace(fleet, workers=strange))[inc(2)].holder == inc(1)


def test_nothing_is_pulled_from_who_leaves_or_sleeps() -> None:
    """It declines; the next best holder is asked."""
    fleet, prompt = fleet_of(), prompt_of(8000, {1: 7984})
    assert plans(prompt, fleet)[inc(2)].holder == inc(1)
    leaving = tuple(replace(each, draining=each.incarnation == inc(1)) for each in fleet.workers)
    assert not plans(prompt, replace(fleet, workers=leaving))


def test_a_pull_has_as_long_as_computing_would_take() -> None:
    """Within bounds: a step's jitter is no reason to give up, and no wait is for ever."""
    (plan,) = plans(prompt_of(8001, {1: 8000}), fleet_of()).values()
    least, most = BUDGET_SECONDS
    assert plan.budget_s == plan.compute_s
    assert replace(plan, compute_s=0.001).budget_s == least
    assert replace(plan, compute_s=1e6).budget_s == most


def test_a_fleet_of_those_that_take_embeddings_keeps_its_pulls() -> None:
    """Links of others are left out, as of hand-offs."""
    fleet = fleet_of()
    able = tuple(replace(each, takes_embeds=True) for each in fleet.workers)
    assert replace(fleet, workers=able).taking_embeds().pull_links == fleet.pull_links
    one = (replace(able[0], takes_embeds=False), *able[1:])
    assert not replace(fleet, workers=one).taking_embeds().pull_links


SLOW = LoadReport(
    num_running=0,
    num_waiting=0,
    waiting_tokens=0,
    free_blocks=1000,
    total_blocks=1000,
    prompt_steps=((64, 1.0),),
    decode_steps=((1, 0.01),),
    chunk_tokens=64,
)


async def test_who_computes_is_told_whence_to_pull(make_worker) -> None:
    """In the request: who has it, how much, and how long it may take; ``explain`` has the numbers;
    what comes does not wait at the worker as tokens to be computed."""
    lender = make_worker(D, pull_peers=2, load=replace_load(num_waiting=30, waiting_tokens=9000))
    idle = make_worker(D, pull_peers=2, load=SLOW, step=0.2)
    idle.probed_bytes_per_s = 1e9
    stack = Stack()
    stack.dispatcher._placing.policy = PlacementPolicy(Targets(0.3, 0.025), 0.02)
    await stack.find(lender, idle)
    await until(lambda: lender.incarnation in stack.pool.workers[idle.incarnation].peers)
    request = make_request(100)
    root = root_hash(fingerprint=lender.card.fingerprint.digest, block_size=16)
    hashes = tuple(hash_blocks(root, request.prompt_token_ids, 16))
    lender.tell_blocks(BlockEvents(stored=hashes[:5]))
    await until(lambda: len(stack.fleet.index) == 5)
    for each in (lender, idle):
        await beats(stack, each)
    await stack.run(request)

    (sent,) = idle.submitted
    assert sent.pull == Pull(lender.incarnation, 80, 1250, 0)
    (told,) = stack.dispatcher.explanations.to_json(NO_KEYS)
    (way,) = [each for each in told["ways"] if each["chosen"]]
    assert way["pull"]["holder"] == lender.incarnation.hex()
    assert (way["pull"]["prefix_tokens"], way["pull"]["compute_s"]) == (80, pytest.approx(1.25))
    assert 1.0 < way["pull"]["pull_s"] < 1.1, "behind the step that the lender is in"
    await stack.close()


def replace_load(**fields: int) -> LoadReport:
    from msgspec.structs import replace as replaced

    return replaced(SLOW, **fields)


async def test_a_prefill_leg_pulls_and_its_decode_leg_does_not(make_worker) -> None:
    """The one computes the prompt; to the other it comes anyway."""
    first, second = (make_worker(P, pull_peers=4, load=SLOW) for _ in range(2))
    decode = make_worker(D, pull_peers=4, load=SLOW)
    first.probed_bytes_per_s = second.probed_bytes_per_s = 1e9
    stack = Stack()
    stack.dispatcher._placing.policy = PlacementPolicy(Targets(0.3, 0.025), 5.0)
    await stack.find(first, second, decode)
    await until(lambda: len(stack.fleet.pull_links()) == 6)
    request = make_request(100)
    root = root_hash(fingerprint=decode.card.fingerprint.digest, block_size=16)
    decode.tell_blocks(BlockEvents(stored=tuple(hash_blocks(root, request.prompt_token_ids, 16))))
    await until(lambda: len(stack.fleet.index) == 6)
    for each in (first, second, decode):
        await beats(stack, each)
    await stack.run(request)

    await until(lambda: first.submitted or second.submitted)
    computed = [*first.submitted, *second.submitted]
    assert len(computed) == 1
    sent = computed[0]
    (taken,) = decode.submitted
    assert sent.kv == Produce(decode.incarnation)
    assert sent.pull is not None
    assert (sent.pull.holder, sent.pull.num_tokens) == (decode.incarnation, 96)
    assert taken.pull is None
    await stack.close()


async def test_links_are_as_many_as_a_worker_says(make_worker) -> None:
    """Beside those of hand-offs: each to the next ones in the order of incarnations, so that none
    is called by all; who pulls from nobody calls as before, and nobody calls it."""
    pulling = [make_worker(D, pull_peers=1) for _ in range(3)]
    plain, prefill = make_worker(D), make_worker(P)
    other = make_worker(D, pull_peers=1, revision="r2")
    stack = Stack()
    await stack.find(*pulling, plain, prefill, other)
    everybody = [*pulling, plain, prefill, other]
    await until(lambda: all(each.peers for each in [*pulling, plain]))
    ring = sorted(pulling, key=lambda each: each.incarnation)
    await until(lambda: all(len(each.peers) == 2 for each in pulling))
    for at, worker in enumerate(ring):
        following = ring[(at + 1) % 3].incarnation
        assert set(worker.peers.values()) == {prefill.incarnation, following}
    assert set(plain.peers.values()) == {prefill.incarnation}
    assert not prefill.peers
    assert not other.peers, "another fingerprint"
    assert all(plain.incarnation not in each.peers.values() for each in everybody)
    await stack.close()


async def test_nothing_is_pulled_between_blocks_of_two_sizes(make_worker) -> None:
    """KV may be handed over by such a link, but blocks of another size have other hashes."""
    prefill = make_worker(P, pull_peers=4)
    decode = make_worker(D, pull_peers=4, block_size=64)
    stack = Stack()
    await stack.find(prefill, decode)
    await until(lambda: bool(stack.fleet.usable_links(0.0)))
    assert not stack.fleet.pull_links()
    await stack.close()


async def test_links_of_pulls_count_as_no_hand_off(make_worker) -> None:
    """Nothing is handed over by them: what is said of hand-offs is as it was."""
    first, second = (make_worker(P, pull_peers=4) for _ in range(2))
    one, two = (make_worker(D, pull_peers=4) for _ in range(2))
    stack = Stack()
    await stack.find(first, second, one, two)
    await until(lambda: len(stack.fleet.pull_links()) == 12)
    producers = {first.incarnation, second.incarnation}
    consumers = {one.incarnation, two.incarnation}
    known = stack.pool.workers
    for each in (first, second, one, two):
        peers = handoff_peers(known[each.incarnation], known)
        assert set(peers) == (producers if each.role is D else set())
    assert stack.fleet.usable_links(0.0) == {(p, d) for p in producers for d in consumers}
    await stack.close()
