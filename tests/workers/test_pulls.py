"""What a pulled prefix promises: tokens, blocks, accounts, and that it never fails a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from tests.workers.pair import PROMPT, ROUTER
from tests.workers.pullers import Peers

from tandem.engine.scheduler.connector import Lookup
from tandem.kvtransfer.handoff.messages import Open
from tandem.kvtransfer.transports.base import Progress
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce, Pull
from tandem.protocol.sampling import SamplingParams
from tandem.worker.connectors.prefix_fetch import PullConnector, PullMetrics

LONG = tuple(3 + (11 * index) % 290 for index in range(140))
OTHER = tuple(5 + (13 * index) % 280 for index in range(140))
ROOM = {"num_gpu_blocks_override": 64}
SMALL = {"num_gpu_blocks_override": 12}


@pytest.fixture(params=["tcp", "shm"])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """Two decode workers, one of which has computed ``PROMPT``; KV by slots, and by blocks."""
    made = Peers("dd", request.param, engine=ROOM)
    made.run(1, "before", PROMPT)
    yield made
    made.close()


def test_a_prefix_comes_from_a_peer_and_tokens_are_those_of_one_worker(peers: Peers) -> None:
    """Whole blocks come, the rest is computed; the client is told that they were cached."""
    size = peers[0].core.manager.block_size
    whole = len(PROMPT) // size * size

    tokens = peers.run(0, "a", PROMPT, holder=1)
    peers.settled()

    assert tokens == peers[1].tokens("before")
    assert peers[0].cached("a") == whole
    assert peers[0].counted("pulls_total") == 1
    assert peers[0].counted("pulled_tokens_total") == peers[1].counted("lent_tokens_total") == whole
    assert peers.run(0, "again", PROMPT, holder=1) == tokens
    assert peers[0].counted("pulls_total") == 1, "what came is cached here by now"
    assert peers[0].counted("pull_fallbacks_total", reason="cached") == 1


@pytest.mark.full
def test_a_conversation_goes_on_from_tokens_that_a_peer_generated(peers: Peers) -> None:
    """A decode worker has cached what it wrote itself, and lends that, too."""
    size = peers[0].core.manager.block_size
    wrote = peers.run(1, "turn", PROMPT, max_tokens=40)
    turn = (*PROMPT, *wrote, *OTHER[:9])

    tokens = peers.run(0, "a", turn, holder=1)

    assert peers[0].counted("pulled_tokens_total") >= (len(PROMPT) + 38) // size * size
    assert tokens == peers.run(1, "alone", turn)
    peers.settled()


def test_a_peer_lends_what_it_still_has(peers: Peers) -> None:
    """The router believes it to have more: what it has comes, the rest is computed."""
    size = peers[0].core.manager.block_size
    further = (*PROMPT[:48], *OTHER[:60])

    tokens = peers.run(0, "a", further, holder=1)

    assert peers[0].counted("pulled_tokens_total") == 48 // size * size
    assert tokens == peers.run(1, "alone", further)
    peers.settled()


def test_nothing_is_pulled_that_the_peer_has_lost(peers: Peers) -> None:
    """Its answer is at once, and the prompt is computed."""
    before = peers[1].tokens("before")
    peers[1].core.manager.reset_prefix_cache()

    assert peers.run(0, "a", PROMPT, holder=1) == before
    assert peers[0].counted("pull_fallbacks_total", reason="gone") == 1
    assert peers[1].counted("loans_declined_total", reason="evicted") == 1
    assert peers[0].cached("a") == 0
    peers.settled()


def test_a_peer_with_no_more_than_is_here_is_let_go_of(peers: Peers) -> None:
    """The router believed it to have more."""
    tokens = peers.run(0, "short", PROMPT[:48])
    peers[1].core.manager.reset_prefix_cache()
    peers.run(1, "short", PROMPT[:40])

    assert len(tokens) == 8
    assert peers.run(0, "a", PROMPT, holder=1) == peers[1].tokens("before")
    assert peers[0].counted("pull_fallbacks_total", reason="less") == 1
    peers.settled()


def test_a_peer_that_stands_costs_no_more_than_the_budget(peers: Peers) -> None:
    """Its engine takes no step: when the time of computing is over, the prompt is computed; what
    the peer lends too late is given back."""
    before = peers[1].tokens("before")
    peers.standing.add(1)
    assert peers.run(0, "a", PROMPT, holder=1, pull_ms=100) == before
    assert peers[0].counted("pull_fallbacks_total", reason="timeout") == 1

    peers.standing.clear()
    peers.settled()
    assert peers[0].counted("pulls_total") == 0


def test_a_peer_that_is_gone_costs_time_alone(peers: Peers) -> None:
    """Lost before it is asked, and lost when it has been."""
    before = peers[1].tokens("before")
    peers.standing.add(1)
    peers.ask(0, "a", PROMPT, holder=1)
    peers.until(lambda: bool(peers[0].core.stats()["parked"]))
    peers[1].parts.handoff.close()
    peers.until(lambda: peers[0].finished("a"))
    assert peers[0].tokens("a") == before
    assert peers[0].counted("pull_fallbacks_total", reason="peer") == 1

    peers[0].core.manager.reset_prefix_cache()
    peers.until(lambda: not peers[0].ends.consumer.peer_up(peers[1].me))
    assert peers.run(0, "b", PROMPT, holder=1) == before
    assert peers[0].counted("pull_fallbacks_total", reason="no_link") == 1
    assert peers[0].free


def test_no_client_hears_of_a_lender_that_fails_while_it_is_read() -> None:
    """The reads end with an error: computed, with the blocks taken anew."""
    peers = Peers("dd", "shm", engine=ROOM)
    try:
        before = peers.run(1, "before", PROMPT)
        hold = _held(peers)
        peers.ask(0, "a", PROMPT, holder=1)
        peers.until(lambda: _reads(peers))
        peers.standing.add(1)
        peers[1].parts.handoff.close()
        hold.clear()
        peers.until(lambda: peers[0].finished("a"))
        assert peers[0].tokens("a") == before
        assert peers[0].free
    finally:
        peers.close()


def test_lent_blocks_are_not_taken_for_others() -> None:
    """While a peer reads them, the lender computes prompts that want every block it has: the lent
    ones are left alone, and what the peer gets is right."""
    peers = Peers("dd", "shm", engine=SMALL, kv_pull_quota=0.5)
    try:
        before = peers.run(1, "before", PROMPT)
        hold = _held(peers)
        peers.ask(0, "a", PROMPT, holder=1)
        peers.until(lambda: _reads(peers))
        lent = peers[1].core.stats()["held_blocks"]
        assert lent == len(PROMPT) // peers[1].core.manager.block_size
        assert peers[1].counted("lent_blocks") == lent
        assert (peers[0].counted("pulls_open"), peers[1].counted("pulls_open")) == (1, 0)
        for index in range(3):
            peers.run(1, f"other {index}", [7 + index, *OTHER[:90]])
        assert peers[1].core.stats()["held_blocks"] == lent
        hold.clear()
        peers.until(lambda: peers[0].finished("a"))
        assert peers[0].tokens("a") == before
        assert peers[0].counted("pulls_total") == 1
        peers.settled()
        assert (peers[0].counted("pulls_open"), peers[1].counted("lent_blocks")) == (0, 0)
    finally:
        peers.close()


def test_a_request_that_is_dropped_while_it_pulls_leaves_nothing() -> None:
    """Parked, and while blocks are written: both ends hold nothing in the end."""
    peers = Peers("dd", "shm", engine=ROOM)
    try:
        peers.run(1, "before", PROMPT)
        peers.standing.add(1)
        parked = peers.ask(0, "a", PROMPT, holder=1)
        peers.until(lambda: bool(peers[0].core.stats()["parked"]))
        assert peers[0].core.abort(parked)
        peers.standing.clear()
        peers.settled()

        hold = _held(peers)
        key = peers.ask(0, "b", PROMPT, holder=1)
        peers.until(lambda: _reads(peers))
        assert peers[0].core.abort(key)
        peers[0].step()
        assert peers[0].core.stats()["held_requests"] == 1, "a copy may still land"
        hold.clear()
        peers.settled()
    finally:
        peers.close()


def test_a_lost_router_takes_its_loans_along() -> None:
    """Nobody waits for a deadline of what was lent for it."""
    peers = Peers("dd", "shm", engine=ROOM)
    try:
        before = peers.run(1, "before", PROMPT)
        hold = _held(peers)
        peers.ask(0, "a", PROMPT, holder=1)
        peers.until(lambda: _reads(peers))
        peers[1].core.abort_router(ROUTER)
        peers.until(lambda: peers[1].free)
        hold.clear()
        peers.until(lambda: peers[0].finished("a"))
        assert peers[0].tokens("a") == before, "what came of a loan that lapsed is not used"
        assert peers[0].counted("pulls_total") == 0
        peers.settled()
    finally:
        peers.close()


@pytest.mark.parametrize(("share", "blocks"), [(0.05, 3), (0.01, 0)])
def test_what_is_lent_is_bounded(share: float, blocks: int) -> None:
    """By a share of the lender's blocks: of 64 a twentieth, and less than one."""
    peers = Peers("dd", engine=ROOM, kv_pull_quota=share)
    try:
        before = peers.run(1, "before", PROMPT)
        assert peers.run(0, "a", PROMPT, holder=1) == before
        size = peers[0].core.manager.block_size
        assert peers[0].counted("pulled_tokens_total") == blocks * size
        if not blocks:
            assert peers[1].counted("loans_declined_total", reason="quota") == 1
            assert peers[0].counted("pull_fallbacks_total", reason="gone") == 1
        peers.settled()
    finally:
        peers.close()


def test_a_prefill_worker_pulls_and_hands_over() -> None:
    """Its peer's prefix, or the one of the decode worker that goes on: the whole prompt is handed
    over, by the hand-off that it would be without."""
    peers = Peers("ppd", engine=ROOM)
    try:
        alone = peers.run(2, "alone", LONG)
        peers.run(0, "before", LONG)
        peers[2].core.manager.reset_prefix_cache()
        hand_over(peers, "a", 1, 2, holder=0)
        assert peers[2].tokens("a") == alone
        assert peers[1].counted("pulls_total") == 1
        assert peers[1].cached("a") == len(LONG) // 16 * 16

        peers[1].core.manager.reset_prefix_cache()
        hand_over(peers, "b", 1, 2, holder=2)
        assert peers[2].tokens("b") == alone
        assert peers[1].counted("pulls_total") == 2
        assert peers[2].counted("lent_tokens_total") > 0
        peers.settled()
    finally:
        peers.close()


def hand_over(peers: Peers, name: str, first: int, then: int, *, holder: int) -> None:
    """Both legs of a request whose prefill worker pulls."""
    peers.ask(then, name, LONG, kv=Consume(peers[first].me))
    peers.ask(first, name, LONG, kv=Produce(peers[then].me), holder=holder)
    peers.until(lambda: peers[then].finished(name))


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_peer_gets_nothing_under_a_key_of_requests(role: str) -> None:
    """A loan's key is one that no request has; whoever asks under another is answered GONE."""
    peers = Peers(f"d{role}", engine=ROOM)
    try:
        peers.run(1, "before", PROMPT)
        key = RequestKey(ROUTER, "anybody", 0)
        hashes = tuple(peers[1].core.manager.pool.cached())
        peers[0].ends.consumer.open(key, peers[1].me, budget_ms=5_000, hashes=hashes)
        exports: Any = peers[1].ends.producer._mover.table.exports
        peers.until(lambda: key in exports and exports[key].state == "gone")
        assert not peers[1].core.stats()["held_blocks"]
    finally:
        peers.close()


def test_a_worker_that_lends_nothing_says_so() -> None:
    """One without links of pulls: a peer that asks is answered at once."""
    from tests.workers.pair import Pair

    pair = Pair()
    try:
        key = RequestKey(ROUTER, "a", 0).for_pull
        pair.consumer.open(key, pair.p_id, budget_ms=5_000, hashes=(BlockHash(bytes(16)),))
        exports: Any = pair.producer._mover.table.exports
        pair.until(lambda: key in exports and exports[key].state == "gone")
    finally:
        pair.close()


def test_several_choices_that_differ_pull_nothing() -> None:
    """They are several sequences of one key: computed, as without a peer."""
    peers = Peers("dd", engine=ROOM)
    try:
        key = RequestKey(ROUTER, "a", 0)
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=8, n=2)
        request = EngineCoreRequest(
            key=key,
            prompt_token_ids=list(PROMPT),
            params=params,
            emitted=((7,), (8,)),
            pull=Pull(peers[1].me, 64, 1_000),
        )
        assert peers[0].core.add(request) is None
        peers.until(lambda: all(peers[0].finished("a", n) for n in range(2)))
        assert peers[0].free
    finally:
        peers.close()


def test_hashes_of_a_message_are_bounded() -> None:
    """What a peer asks for fits its message, and is made of whole hashes."""
    from msgspec import ValidationError, convert, to_builtins

    key = RequestKey(ROUTER, "a", 0).for_pull
    good = to_builtins(Open(key, 5, (BlockHash(bytes(16)),)), builtin_types=(bytes,))
    assert convert(good, Open, strict=False) == Open(key, 5, (BlockHash(bytes(16)),))
    for wrong in ([bytes(15)], [bytes(16)] * 32769):
        with pytest.raises(ValidationError):
            convert({**good, "hashes": wrong}, Open)


class _Asked:
    """A consumer of which a pull is asked; what came of it is never said."""

    wants_hashes = False
    num_hashes = 0

    def peer_up(self, _holder: object) -> bool:
        return True

    def open(self, _key: object, _holder: object, *, budget_ms: int, hashes: list[object]) -> None:
        self.num_hashes = len(hashes)


@pytest.mark.parametrize(("num_blocks", "asked"), [(3, 3), (40_000, 32_768)])
def test_no_more_is_asked_for_than_a_peer_reads_of_a_message(num_blocks: int, asked: int) -> None:
    """A longer one would cost the link, and all hand-offs on it; the rest is computed."""
    consumer, metrics = _Asked(), PullMetrics(CollectorRegistry())
    connector = PullConnector(cast("Any", consumer), 16, metrics, poll=list)
    request = SimpleNamespace(
        key=RequestKey(ROUTER, "a", 0),
        source=SimpleNamespace(pull=Pull(Incarnation(bytes(16)), 16 * num_blocks, 1_000)),
        group=SimpleNamespace(live=[None]),
        max_cached_tokens=16 * num_blocks + 5,
        hashes_upto=lambda count: [bytes(16)] * count,
    )
    assert connector.lookup(cast("Any", request), 0).lookup is Lookup.LATER
    assert consumer.num_hashes == asked


def _held(peers: Peers) -> threading.Event:
    """Reads of the first worker stand until ``clear``."""
    transport: Any = peers[0].ends.consumer._mover.parts.transports["shm"]
    poll, hold = transport.poll, threading.Event()
    hold.set()
    transport.poll = lambda ticket: Progress.PENDING if hold.is_set() else poll(ticket)
    return hold


def _reads(peers: Peers) -> bool:
    return any(each.reading for each in peers[0].ends.consumer._mover.table.pulls.values())
