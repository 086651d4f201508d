"""Placement: the policy, the index of cached blocks, and the health of links. All pure."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.builders import STRICT, inc, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash
from tandem.protocol.outputs import BlockEvents
from tandem.router.placement import prefix_index
from tandem.router.placement import rates as health
from tandem.router.placement.prefix_index import ENTRY_BYTES, PrefixIndex
from tandem.router.placement.rates import LinkHealth, WorkerHealth
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, PromptFacts

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
NONE = Exclusions()


def place(prompt, workers, *, links=None, exclusions=NONE):
    """Ask the policy; all pairs are linked unless said otherwise."""
    producers = [w.incarnation for w in workers if w.role is P]
    consumers = [w.incarnation for w in workers if w.role is D]
    if links is None:
        links = [(p, d) for p in producers for d in consumers]
    fleet = FleetSnapshot(tuple(workers), frozenset(links))
    return STRICT.place(prompt, fleet, exclusions)


def where(placement):
    if placement is None:
        return None
    number = int.from_bytes(placement.worker, "big")
    prefill = placement.prefill
    return (None if prefill is None else int.from_bytes(prefill, "big"), number)


LONG = PromptFacts(num_tokens=1000)


def test_nobody() -> None:
    """Without a decode worker there is no place."""
    assert place(LONG, []) is None
    assert place(LONG, [view(1, P)]) is None


def test_shapes() -> None:
    """Strict placement hands over whatever it can, else one worker does all."""
    workers = [view(1, P), view(2, D)]
    cached = PromptFacts(num_tokens=1000, hits={inc(2): 992})
    whole = PromptFacts(num_tokens=1000, whole=True)

    assert where(place(LONG, workers)) == (1, 2)
    assert where(place(LONG, workers[1:])) == (None, 2)
    assert where(place(cached, workers)) == (1, 2)
    assert where(place(whole, workers)) == (None, 2)
    assert where(place(LONG, workers, links=[])) == (None, 2)
    assert place(LONG, workers).pair == (inc(1), inc(2))
    assert place(whole, workers).pair is None


def test_one_token() -> None:
    """The prefill worker does all of it, if there is one."""
    one = PromptFacts(num_tokens=1000, one_token=True)
    assert where(place(one, [view(1, P), view(2, D)])) == (None, 1)
    assert where(place(one, [view(2, D)])) == (None, 2)
    last = Exclusions(no_handoff=True)
    assert where(place(one, [view(1, P), view(2, D)], exclusions=last)) == (None, 2)


def test_prefix_then_load() -> None:
    """A long hit outweighs some load; a great load outweighs the hit."""
    hit = PromptFacts(num_tokens=1000, hits={inc(2): 640})
    assert where(place(hit, [view(1, P), view(2, P), view(3, D)])) == (2, 3)
    assert where(place(hit, [view(1, P), view(2, P, waiting_tokens=400), view(3, D)])) == (2, 3)
    assert where(place(hit, [view(1, P), view(2, P, waiting_tokens=4000), view(3, D)])) == (1, 3)


def test_load_of_decode_workers() -> None:
    """Fewer requests, more room; what was sent since the last report counts too."""
    assert where(place(LONG, [view(1, D, num_running=3), view(2, D)])) == (None, 2)
    assert where(place(LONG, [view(1, D, num_legs=3), view(2, D)])) == (None, 2)
    assert where(
        place(LONG, [view(1, D, free_share=0.01, num_running=1), view(2, D, num_running=5)])
    ) == (
        None,
        2,
    )
    assert where(place(LONG, [view(1, D, suspect=True), view(2, D, num_running=60)])) == (None, 2)


def test_who_may_not_meet() -> None:
    """Other fingerprints, broken links, excluded and draining workers."""
    workers = [view(1, P), view(2, P), view(3, D)]
    assert where(place(LONG, [view(1, P, fingerprint="g"), view(3, D)])) == (None, 3)
    assert where(place(LONG, workers, links=[(inc(2), inc(3))])) == (2, 3)
    assert where(place(LONG, workers, exclusions=Exclusions(workers=frozenset({inc(1)})))) == (2, 3)
    assert where(place(LONG, workers, exclusions=Exclusions(prefill=frozenset({inc(1)})))) == (2, 3)
    pairs = Exclusions(pairs=frozenset({(inc(1), inc(3))}))
    assert where(place(LONG, workers, exclusions=pairs)) == (2, 3)
    assert where(place(LONG, [view(1, P, draining=True), *workers[1:]])) == (2, 3)
    assert place(LONG, [view(3, D, draining=True)]) is None
    pinned = PromptFacts(num_tokens=1000, fingerprint="g")
    assert place(pinned, workers) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    loads=st.lists(
        st.tuples(
            st.sampled_from([P, D]),
            st.integers(0, 20),
            st.integers(0, 5000),
            st.booleans(),
            st.sampled_from([600, 2048, 6000]),
            st.sampled_from([None, 500, 3000]),
        ),
        min_size=1,
        max_size=8,
    ),
    num_tokens=st.integers(1, 5000),
    max_new_tokens=st.none() | st.integers(1, 3000),
    excluded=st.sets(st.integers(0, 7)),
)
def test_any_fleet(loads, num_tokens, max_new_tokens, excluded) -> None:
    """Never an excluded or draining worker, never two of one role, nowhere where the prompt does
    not fit or may not be handed over; None only without a D that holds it."""
    workers = [
        view(
            number,
            role,
            num_running=running,
            waiting_tokens=tokens,
            draining=draining,
            max_model_len=longest,
            max_handoff_tokens=handed,
        )
        for number, (role, running, tokens, draining, longest, handed) in enumerate(loads)
    ]
    exclusions = Exclusions(workers=frozenset(inc(number) for number in excluded))
    prompt = PromptFacts(num_tokens=num_tokens, max_new_tokens=max_new_tokens)
    placement = place(prompt, workers, exclusions=exclusions)
    usable = {w.incarnation: w for w in workers if not w.draining and num_tokens < w.max_model_len}
    for number in excluded:
        usable.pop(inc(number), None)

    if placement is None:
        assert not any(w.role is D for w in usable.values())
        return
    decode = usable[placement.worker]
    assert decode.role is D
    whole = num_tokens + (max_new_tokens or 0)
    longest = max(w.max_model_len for w in usable.values() if w.role is D)
    assert whole <= decode.max_model_len or whole > longest
    if placement.prefill is not None:
        prefill = usable[placement.prefill]
        assert prefill.role is P
        assert num_tokens <= (prefill.max_handoff_tokens or num_tokens)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_index_follows_events() -> None:
    """Stored, removed, cleared, in this order of precedence."""
    index = PrefixIndex(1 << 20)
    hashes = [block(n) for n in range(4)]
    index.apply(inc(1), BlockEvents(stored=tuple(hashes)))
    index.apply(inc(2), BlockEvents(stored=(hashes[0],)))
    index.apply(inc(1), BlockEvents(removed=(hashes[2],)))

    assert index.hits(inc(1), hashes) == 2
    assert index.hits(inc(9), hashes) == 0
    assert index.hits(inc(2), hashes) == 1
    index.apply(inc(1), BlockEvents(cleared=True, stored=(hashes[0],)))
    assert index.hits(inc(1), hashes) == 1
    index.drop(inc(1))
    index.drop(inc(1))
    assert (index.hits(inc(1), hashes), len(index)) == (0, 1)
    assert index.hits(inc(2), [hashes[0]]) == 1


def test_index_forgets_no_more_at_once_than_streams_can_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sixteenth of two million blocks took tens of milliseconds."""
    monkeypatch.setattr(prefix_index, "MOST_FORGOTTEN", 2)
    index = PrefixIndex(320 * ENTRY_BYTES)
    index.apply(inc(1), BlockEvents(stored=tuple(map(block, range(320)))))
    index.apply(inc(1), BlockEvents(stored=(block(320),)))
    assert len(index) == 319


def test_index_forgets_the_oldest_of_the_largest() -> None:
    """The bound holds; the smaller worker keeps its entries."""
    index = PrefixIndex(32 * ENTRY_BYTES)
    index.apply(inc(2), BlockEvents(stored=(block(1000),)))
    for number in range(100):
        index.apply(inc(1), BlockEvents(stored=(block(number),)))
        assert len(index) <= 32

    assert index.hits(inc(1), [block(99)]) == 1
    assert index.hits(inc(1), [block(0)]) == 0
    assert index.hits(inc(2), [block(1000)]) == 1


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(0, 15), max_size=6),
            st.lists(st.integers(0, 15), max_size=6),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_index_equals_sets(events) -> None:
    """Within its bound the index is one set per worker, and its length their sizes."""
    index = PrefixIndex(1 << 20)
    model: dict[int, set[int]] = {}
    for worker, stored, removed, cleared in events:
        index.apply(
            inc(worker),
            BlockEvents(tuple(map(block, stored)), tuple(map(block, removed)), cleared),
        )
        held = set() if cleared else model.get(worker, set())
        model[worker] = (held | set(stored)) - set(removed)

    assert len(index) == sum(map(len, model.values()))
    for worker, held in model.items():
        assert [index.hits(inc(worker), [block(n)]) for n in range(16)] == [
            int(n in held) for n in range(16)
        ]


@pytest.mark.parametrize("shared", [1, 4, 8])
def test_a_chain_that_is_asked_for_is_not_forgotten(shared: int) -> None:
    """From its first block on, though it is stored once and others go on coming; nor is the rest of
    it, where prompts share its start alone. One that nobody asks for goes."""
    index = PrefixIndex(32 * ENTRY_BYTES)
    chain, other = [block(n) for n in range(8)], [block(n) for n in range(8, 12)]
    index.apply(inc(1), BlockEvents(stored=tuple(chain)))
    index.apply(inc(1), BlockEvents(stored=tuple(other)))
    for step in range(100):
        new = tuple(block(100 + 4 * step + n) for n in range(4))
        index.apply(inc(1), BlockEvents(stored=new))
        assert index.hits(inc(1), [*chain[:shared], block(1000 + step)]) == shared
        if step % 2:
            assert index.hits(inc(1), chain) == 8
        assert len(index) <= 32
    assert index.hits(inc(1), other) == 0


def test_nothing_is_made_young_while_there_is_room() -> None:
    """It takes as long again as looking it up, and who is asked for when it is nearly full is asked
    for early enough: what was asked for before that alone is forgotten as others are."""
    index = PrefixIndex(32 * ENTRY_BYTES)
    chain = [block(n) for n in range(4)]
    index.apply(inc(1), BlockEvents(stored=tuple(chain)))
    index.apply(inc(1), BlockEvents(stored=tuple(block(n) for n in range(4, 24))))
    assert index.hits(inc(1), chain) == 4
    index.apply(inc(1), BlockEvents(stored=tuple(block(n) for n in range(24, 36))))
    assert index.hits(inc(1), chain) == 0


PAIR = (inc(1), inc(2))


@pytest.mark.parametrize("cause", [FailCause.IDENTITY, FailCause.DIGEST])
def test_one_wrong_byte_quarantines(cause: FailCause) -> None:
    """For ever, or until one end is another process; one that was lost may come back."""
    links = LinkHealth()
    links.failed(PAIR, cause, 0.0)
    links.succeeded(PAIR)

    assert not links.usable(PAIR, 1e9)
    assert links.quarantined() == {PAIR: cause}
    links.forget(inc(1))
    assert not links.usable(PAIR, 1e9)
    assert links.usable((inc(3), inc(2)), 0.0)
    for other in range(health.MAX_QUARANTINED):
        links.failed((inc(other + 10), inc(2)), cause, 0.0)
    assert len(links.quarantined()) == health.MAX_QUARANTINED


@pytest.mark.parametrize(
    "cause", [FailCause.PEER, FailCause.GONE, FailCause.WORKER_LOST, FailCause.DRAINING]
)
def test_what_is_not_the_links_fault(cause: FailCause) -> None:
    links = LinkHealth()
    for at in range(10):
        links.failed(PAIR, cause, float(at))
    assert links.usable(PAIR, 10.0)


def test_timeouts_rest_a_link() -> None:
    """Several within a while; a success in between starts over; after the rest it is tried."""
    links = LinkHealth()
    for _ in range(health.TIMEOUTS - 1):
        links.failed(PAIR, FailCause.TIMEOUT, 0.0)
    links.succeeded(PAIR)
    links.slow(PAIR, 0.0)
    assert links.usable(PAIR, 0.0)
    links.slow(PAIR, 1.0)
    links.failed(PAIR, FailCause.TIMEOUT, 2.0)
    assert not links.usable(PAIR, 3.0)
    assert links.usable(PAIR, 2.0 + health.REST)
    links.succeeded((inc(8), inc(9)))


def test_old_timeouts_do_not_count() -> None:
    """Only those of the last while."""
    links = LinkHealth()
    for step in range(6):
        links.failed(PAIR, FailCause.TIMEOUT, step * health.WINDOW)
    assert links.usable(PAIR, 6 * health.WINDOW)


def test_suspect_workers() -> None:
    """Internal errors one after the other, for a while, by incarnation."""
    workers = WorkerHealth()
    for at in range(health.FAULTS):
        assert not workers.suspect(inc(1), float(at))
        workers.fault(inc(1), float(at))
    assert workers.suspect(inc(1), 3.0)
    assert not workers.suspect(inc(1), 3.0 + health.REST)
    workers.forget(inc(1))
    assert not workers.suspect(inc(1), 3.0)
