"""When a peer is asked for a prefix and when it lends one: never past who waits at either end."""

from __future__ import annotations

from tests.workers.pair import PROMPT, ROUTER
from tests.workers.pullers import Peers
from tests.workers.test_pulls import LONG, OTHER

from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.requests import Consume, Produce


def test_a_peer_is_asked_when_there_is_room_for_what_it_lends() -> None:
    """Five prompts wait behind one whose blocks are all of the puller's: nothing is lent until it
    ends; then all are pulled."""
    engine = {"num_gpu_blocks_override": 34, "max_num_seqs": 8}
    peers = Peers("dd", engine=engine, kv_pull_quota=0.9)
    try:
        prompts = [[9 + index, *PROMPT[1:]] for index in range(5)]
        said = [peers.run(1, f"before {at}", prompt) for at, prompt in enumerate(prompts)]
        peers.ask(0, "large", [5 + at % 300 for at in range(470)], max_tokens=30, ignore_eos=True)
        peers.until(lambda: bool(peers[0].tokens("large")))
        for at, prompt in enumerate(prompts):
            peers.ask(0, f"a{at}", prompt, holder=1)

        def through() -> bool:
            assert peers[0].finished("large") or not peers[1].counted("lent_tokens_total")
            return all(peers[0].finished(f"a{at}") for at in range(5))

        peers.until(through)
        assert [peers[0].tokens(f"a{at}") for at in range(5)] == said
        assert peers[0].counted("pulls_total") == 5
        peers.settled()
    finally:
        peers.close()


def test_a_prompt_waits_for_loans_and_not_for_all_that_peers_ask_for() -> None:
    """A peer asks anew before it lets go of what it has: the hand-off that finds too few blocks
    free beside one loan starts all the same."""
    engine = {"num_gpu_blocks_override": 40, "max_num_seqs": 8}
    peers = Peers("dp", engine=engine, kv_pull_quota=0.6, kv_lease_quota=1.0)
    try:
        consumer, lender = peers[0].ends.consumer, peers[1]
        lent_of = [_hashes_of(peers, 1, [7 + at, *LONG, *OTHER[:60]]) for at in range(2)]
        asked: list[RequestKey] = []
        let_go: set[RequestKey] = set()

        def again() -> None:
            whole = lender.counted("lent_tokens_total") / 16 / 12
            if whole + lender.counted("loans_declined_total", reason="quota") < len(asked):
                return
            held = [key for key in asked if key in lender.core.scheduler.held_keys()]
            if len(asked) > 1 and held and held[0] not in let_go:
                let_go.add(held[0])
                consumer.cancel(held[0])
            hashes = lent_of[len(asked) % 2]
            asked.append(RequestKey(ROUTER, f"asked {len(asked)}", 0).for_pull)
            consumer.open(asked[-1], lender.me, budget_ms=15_000, hashes=hashes[:12])

        again()
        peers.until(lambda: bool(lender.core.stats()["held_blocks"]))
        large = [5 + at % 300 for at in range(490)]
        peers.ask(0, "large", large, kv=Consume(lender.me), max_tokens=4)
        peers.ask(1, "large", large, kv=Produce(peers[0].me), max_tokens=4)

        def answered() -> bool:
            if not lender.tokens("large"):
                again()
            return peers[0].finished("large")

        peers.until(answered)
        for key in set(asked) - let_go:
            consumer.cancel(key)
        peers.settled()
    finally:
        peers.close()


def test_a_worker_on_its_way_out_lends_nothing() -> None:
    """It would be held up by what it promised; the peer computes at once."""
    peers = Peers("dd", engine={"num_gpu_blocks_override": 64})
    try:
        before = peers.run(1, "before", PROMPT)
        peers[1].core.drain()
        assert peers.run(0, "a", PROMPT, holder=1) == before
        assert peers[1].counted("loans_declined_total", reason="leaving") == 1
        assert not peers[1].counted("lent_tokens_total")
        peers.settled()
    finally:
        peers.close()


def test_what_lies_in_the_pullers_own_tier_is_not_pulled() -> None:
    """The router counts it as there; the peer has one block more, which is computed."""
    engine = {"num_gpu_blocks_override": 12, "kv_offloading_size": 0.001}
    peers = Peers("dd", engine=engine)
    try:
        longer = [*PROMPT, *OTHER[:20]]
        said = peers.run(1, "before", longer)
        peers.run(0, "before", PROMPT)
        for index in range(4):
            peers.run(0, f"other {index}", [7 + index, *OTHER[:120]])
        assert peers.run(0, "a", longer, holder=1, have=64) == said
        assert peers[0].counted("pull_fallbacks_total", reason="tier") == 1
        assert not peers[0].counted("pulls_total")
        assert peers[0].cached("a") == 64, "it came from host memory"
        peers.settled()
    finally:
        peers.close()


def _hashes_of(peers: Peers, at: int, prompt: list[int]) -> tuple[BlockHash, ...]:
    """Of the full blocks of a prompt that the worker has computed now."""
    name = f"of {prompt[0]}"
    peers.ask(at, name, prompt, max_tokens=1)
    (request,) = peers[at].core.scheduler.request_table.by_seq.values()
    hashes = tuple(request.hashes_upto(len(prompt) // 16))
    peers.until(lambda: peers[at].finished(name))
    return hashes
