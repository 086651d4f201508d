"""Both services over real threads and sockets: many keys, many peers, and their ends."""

import logging
import random
import threading

import pytest
from tests.kvtransfer import builders
from tests.kvtransfer.builders import Consumer, Producer, kv_of, make_config, make_key, only

from tandem.kvtransfer import events
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.service import parts
from tandem.kvtransfer.service import producer as producer_module
from tandem.kvtransfer.service.parts import as_bytes
from tandem.protocol.errors import FailCause, InvalidParameter, RefusalCode
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.kv import FirstToken
from tandem.protocol.outputs import TokenLogprobs


@pytest.mark.parametrize("connector", ["memory", "memory_blocks", "shm", "tcp", "nixl"])
def test_every_transport_delivers_the_right_bytes(workers, connector):
    """Prompts of many lengths, several at once, in blocks that are out of order."""
    config = make_config(kv_connector=connector)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    assert [each.transport for each in consumer.service.peer_health()] == [connector]
    rng = random.Random(3)
    sizes = [1, 3, 4, 5, 8, 9, 31, 32]
    homes = rng.sample(range(64), 36)
    targets = rng.sample(range(64), 36)
    at, used = 0, {}
    for n, size in enumerate(sizes):
        key, count = make_key(f"{connector}{n}"), -(-size // 4)
        used[key] = (size, targets[at : at + count])
        consumer.open(key, producer.incarnation)
        producer.hand_over(key, size, homes[at : at + count], consumer.incarnation)
        at += count
    for key, (_, blocks) in used.items():
        consumer.load(key, blocks)
    for key, (size, blocks) in used.items():
        consumer.wait_for(events.Loaded, key)
        assert consumer.holds(key.request, size, blocks)
        producer.wait_for(events.Released, key)
    assert not consumer.service.has_pending()
    assert not producer.service.has_pending()
    assert producer.service.leased_blocks() == 0


def test_a_consumer_takes_from_many_and_a_producer_gives_to_many(workers):
    """Two producers and two consumers, every pair."""
    producers = [workers(Producer) for _ in range(2)]
    consumers = [workers(Consumer) for _ in range(2)]
    for consumer in consumers:
        consumer.service.set_peers({p.service.control: p.incarnation for p in producers})
        consumer.until(lambda c=consumer: all(c.service.peer_up(p.incarnation) for p in producers))
    for p, producer in enumerate(producers):
        for c, consumer in enumerate(consumers):
            key = make_key(f"{p}{c}")
            consumer.open(key, producer.incarnation)
            blocks = list(range(10 * c, 10 * c + 3))
            producer.hand_over(key, 12, blocks, consumer.incarnation)
            consumer.load(key, [3 * p, 3 * p + 1, 3 * p + 2])
    for p in range(2):
        for c, consumer in enumerate(consumers):
            consumer.wait_for(events.Loaded, make_key(f"{p}{c}"))
            assert consumer.holds(f"{p}{c}", 12, [3 * p, 3 * p + 1, 3 * p + 2])


def test_a_peer_that_discovery_drops_is_let_go(pair):
    producer, consumer = pair
    consumer.service.set_peers({})
    consumer.until(lambda: not consumer.service.peer_up(producer.incarnation))
    producer.until(lambda: not producer.service.consumers())
    assert not producer.service._mover._direct_links
    key = make_key("alone")
    consumer.open(key, producer.incarnation)
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.PEER
    refusal = producer.admit(key, 4, consumer.incarnation)
    assert refusal.code is RefusalCode.PEER_UNKNOWN


def test_a_storm_of_cancels_leaves_nothing_held(pair):
    """Requests that end in random ways at random moments: every slot, block and lease is free."""
    producer, consumer = pair
    rng = random.Random(11)
    keys = [make_key(f"s{n}") for n in range(60)]
    piles = [[4 * n + b for b in range(4)] for n in range(16)]
    homes: dict[RequestKey, list[int]] = {}

    def pile() -> list[int] | None:
        """Blocks that nobody has. Those of a key are not another's before it is released, or who
        copies them finds the tags of another, which speaks against the link."""
        released = [each.key for each in producer.seen if isinstance(each, events.Released)]
        piles.extend(homes.pop(key) for key in released if key in homes)
        return piles.pop(0) if piles else None

    for n, key in enumerate(keys):
        consumer.open(key, producer.incarnation)
        homes[key] = home = producer.until(pile)
        target = [4 * (n % 16) + b for b in range(4)]
        # a refusal is for the moment: as many as may be are admitted when a thread gets no core
        producer.until(lambda k=key: producer.admit(k, 16, consumer.incarnation) is None)
        producer.compute(key, 16, home)
        fate = rng.randrange(5)
        if fate == 0:
            producer.service.cancel(key)
            producer.service.finished(key)
        else:
            producer.end(key, finish="stop" if fate == 1 else None)
        if fate == 2:
            consumer.service.cancel(key)
        consumer.collect()
        consumer.service.begin_load(key, only(target), 0, 16)
        if fate == 3:
            consumer.service.cancel(key)
        if n % 5 == 0:
            producer.collect()
            consumer.collect()
    for key in keys:
        consumer.service.cancel(key)
    consumer.until(lambda: not consumer.service.has_pending())
    producer.until(lambda: not producer.service.has_pending())
    endings = [e for e in consumer.seen if not isinstance(e, events.Ready | events.Released)]
    assert sorted(e.key for e in endings) == sorted(keys)
    released = [e.key for e in producer.seen if isinstance(e, events.Released)]
    assert sorted(released) == sorted(keys)
    for service in (producer.service, consumer.service):
        ring = service._mover.table.ring
        (producer if service is producer.service else consumer).until(
            lambda r=ring: r.free == len(r)
        )


def test_admission_says_why_not(pair):
    """Twice the same key, a consumer without a link, more than the quota ever allows."""
    producer, consumer = pair
    key = make_key("twice")
    assert producer.admit(key, 4, consumer.incarnation) is None
    assert producer.admit(key, 4, consumer.incarnation).code is RefusalCode.DUPLICATE
    assert producer.admit(make_key("x"), 4, new_incarnation()).code is RefusalCode.PEER_UNKNOWN
    huge = producer.admit(make_key("y"), 4 * 64, consumer.incarnation)
    assert huge.code is RefusalCode.NEVER_FITS
    producer.service.finished(key)
    producer.wait_for(events.Released, key)
    assert producer.admit(key, 4, consumer.incarnation).code is RefusalCode.DUPLICATE


@pytest.mark.parametrize("pair", ["tcp", "memory_blocks"], indirect=True)
def test_what_is_longer_than_a_peer_may_copy_is_refused_before_it_is_computed(pair, monkeypatch):
    """READY names every block on a link that copies them, and one that is longer is no message;
    parts have no such bound."""
    producer, consumer = pair
    monkeypatch.setattr(producer_module, "MAX_BLOCKS", 3)
    copied = consumer.service.peer_health()[0].transport == "memory_blocks"
    limit = producer.service.max_blocks
    assert (limit == 3) == copied
    assert producer.admit(make_key("fits"), 4 * 3, consumer.incarnation) is None
    refusal = producer.admit(make_key("long"), 4 * 3 + 1, consumer.incarnation)
    if not copied:
        assert refusal is None
        return
    assert refusal.code is RefusalCode.NEVER_FITS
    assert "4 blocks; 3" in refusal.message


def test_a_refused_admission_is_told_to_a_consumer_that_waits(pair):
    """D need not wait for its deadline."""
    producer, consumer = pair
    key = make_key("refused")
    consumer.open(key, producer.incarnation)
    producer.until(lambda: key in producer.service._mover.table.exports)
    assert producer.admit(key, 4 * 64, consumer.incarnation) is not None
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.GONE


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_a_message_that_no_peer_reads_costs_its_own_key_alone(pair, caplog):
    """Log-probabilities of a whole vocabulary beside each first token: a peer would close the
    connection unread, and all hand-offs between the two would be lost with it."""
    producer, consumer = pair
    long, other = make_key("long"), make_key("other")
    link = consumer.service._mover._links[producer.incarnation]
    for key, home in ((long, [0, 1]), (other, [2, 3])):
        consumer.open(key, producer.incarnation)
        assert producer.admit(key, 8, consumer.incarnation) is None
        producer.compute(key, 8, home)
    every = tuple(range(1 << 17))
    logprobs = TokenLogprobs(7, -1.0, 1, every, tuple(-float(each) for each in every))
    producer.service.final(long, [FirstToken(0, 7, logprobs)], None)
    producer.service.finished(long)
    failed = consumer.wait_for(events.LoadFailed, long)
    assert failed.cause is FailCause.GONE
    assert "internal" in failed.message
    producer.wait_for(events.Released, long)
    assert any(str(1 << 20) in record.message for record in caplog.records)
    producer.end(other)
    consumer.load(other, [5, 6])
    consumer.wait_for(events.Loaded, other)
    assert consumer.holds("other", 8, [5, 6])
    assert consumer.service._mover._links[producer.incarnation] == link


def test_a_transfer_thread_that_dies_ends_every_key(pair):
    """The engine is not left with blocks that nobody will ever give back."""
    producer, consumer = pair
    keys = [make_key(f"d{n}") for n in range(2)]
    for key in keys:
        consumer.open(key, producer.incarnation)
        assert producer.admit(key, 4, consumer.incarnation) is None
        producer.service.finished(key)

    def breaks(*_):
        raise RuntimeError("a fault of the test")

    consumer.service._mover.take = breaks
    producer.service._mover.take = breaks
    consumer.service.cancel(keys[0])
    producer.service.cancel(keys[0])
    for key in keys:
        consumer.wait_for(events.LoadFailed, key)
        producer.wait_for(events.Released, key)
    assert "fault of the test" in consumer.until(consumer.service.problem)
    producer.until(producer.service.problem)
    assert producer.admit(make_key("more"), 4, consumer.incarnation) is not None


def test_closing_twice_and_without_starting_is_fine(workers):
    """An entry point that fails half-way can clean up, and no thread of a service is left."""
    before = set(threading.enumerate())
    for kind in (Producer, Consumer):
        worker = workers(kind)
        worker.service.close()
        worker.service.close()
    assert set(threading.enumerate()) <= before


def test_without_nixl_auto_is_tcp_and_says_so(workers, monkeypatch, caplog):
    """A warning in the log and a metric, and the KV moves all the same."""

    def cannot(*_, **__):
        raise TransportError("nixl: cannot load: not on this machine")

    monkeypatch.setattr(parts, "NixlTransport", cannot)
    config = make_config(kv_connector="auto")
    with caplog.at_level(logging.WARNING):
        producer, consumer = workers(Producer, config), workers(Consumer, config)
    assert "plain TCP" in caplog.text
    labels = {"role": "producer", "connector": "tcp", "fallback": "1"}
    assert producer.metric("tandem:kv_transport_info", **labels) == 1
    consumer.meet(producer)
    key = make_key("fallback")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.wait_for(events.Loaded, key)
    assert consumer.holds("fallback", 12, [5, 6, 7])


def test_without_nixl_auto_that_meets_in_a_folder_has_what_is_best(workers, folder, monkeypatch):
    """No alert fires for a way that is better than what is missing."""

    def cannot(*_, **__):
        raise TransportError("nixl: cannot load: not on this machine")

    monkeypatch.setattr(parts, "NixlTransport", cannot)
    producer = workers(Producer, make_config(kv_connector="auto", kv_node_folder=str(folder)))
    labels = {"role": "producer", "connector": "shm", "fallback": "0"}
    assert producer.metric("tandem:kv_transport_info", **labels) == 1


def test_ends_of_which_one_cannot_load_nixl_meet_over_tcp(workers, monkeypatch):
    """auto offers both, the other end takes what it has."""
    producer = workers(Producer, make_config(kv_connector="auto"))
    consumer = workers(Consumer, make_config(kv_connector="tcp"))
    consumer.meet(producer)
    assert consumer.service._mover.welcome_of(producer.incarnation).connector == "tcp"


def test_a_slab_of_another_size_is_named():
    """The error says what came and what is allowed."""
    with pytest.raises(InvalidParameter, match=r"kv_cache: .* 2 blocks"):
        as_bytes(kv_of("a", 4), 2, builders.LAYOUT)


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_phases_bytes_and_outcomes_are_counted(pair):
    producer, consumer = pair
    key = make_key("counted")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.wait_for(events.Loaded, key)
    loaded = {"role": "consumer", "outcome": "loaded"}  # counted last, when the engine knows
    consumer.until(lambda: consumer.metric("tandem:kv_handoffs_total", **loaded) == 1)
    for phase in ("wait", "reserve", "read", "unpack", "commit", "load"):
        assert consumer.metric("tandem:kv_handoff_phase_seconds_count", phase=phase) >= 1
    assert producer.metric("tandem:kv_handoff_phase_seconds_count", phase="pack") >= 1
    nbytes = 3 * builders.LAYOUT.block_bytes
    assert consumer.metric("tandem:kv_handoff_bytes_total", role="consumer") >= nbytes
    assert producer.metric("tandem:kv_handoff_bytes_total", role="producer") >= nbytes
    committed = {"role": "producer", "outcome": "committed"}
    assert producer.metric("tandem:kv_handoffs_total", **committed) == 1
    assert consumer.metric("tandem:kv_links", role="consumer") == 1
    assert consumer.metric("tandem:kv_link_probe_bytes_per_second_count") == 1


def test_may_start_parks_what_exceeds_the_quota(workers):
    """Admitted requests wait for leases to end, in the engine's hands."""
    producer = workers(Producer, make_config(kv_lease_quota=0.25))
    consumer = workers(Consumer)
    consumer.meet(producer)
    first, second = make_key("first"), make_key("second")
    for key in (first, second):
        assert producer.admit(key, 48, consumer.incarnation) is None
    assert producer.service.may_start(first)
    assert not producer.service.may_start(second)
    producer.service.final(first, [FirstToken(0, 1)], "stop")
    producer.service.cancel(first)
    producer.service.finished(first)
    producer.wait_for(events.Released, first)
    assert producer.service.may_start(second)
