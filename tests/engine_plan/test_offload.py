"""The CPU tier in the plan: what is stored and loaded when, and every way in which a load ends."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.pair import Pair, consume, produce

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config import CacheConfig
from tandem.engine.metrics import EngineMetrics
from tandem.engine.offload.connector import OffloadConnector
from tandem.engine.offload.lru import LRUBlocks
from tandem.engine.scheduler.connector import Lookup
from tandem.engine.step import BlockTransfers
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.errors import FailCause, InvalidParameter
from tandem.protocol.ids import BlockHash
from tandem.protocol.requests import EngineCoreRequest

LONG = params_of(max_tokens=4, ignore_eos=True)


def cold(harness: Harness, name: str = "a", prompt: int = 60) -> EngineCoreRequest:
    """A request that was answered, and whose blocks others have pushed out of the cache."""
    request = request_of(name, prompt, params=LONG)
    assert harness.add(request) is None
    harness.run()
    size = harness.core.manager.pool.num_blocks * 16 - 5
    assert harness.add(request_of(f"{name}-other", [9] * size, params=LONG)) is None
    harness.run()
    return request_of(f"{name}-again", list(request.prompt_token_ids), params=LONG)


def offloading(num_blocks: int = 5, num_cpu_blocks: int = 20, **flat) -> Harness:
    """An engine with host memory behind few blocks."""
    return Harness(num_blocks, num_cpu_blocks=num_cpu_blocks, **flat)


def stats_of(harness: Harness):
    assert harness.core._offload is not None
    return harness.core._offload.stats


def test_what_the_cache_loses_comes_back():
    """Blocks go out before they are overwritten; an equal prompt is loaded but for its last block,
    and the client is told that it was cached."""
    harness = offloading()
    again = cold(harness)
    assert harness.core.manager.find_cached_prefix(_entered(harness, again), 60).num_tokens == 0
    harness.run()

    harness.check(again)
    stats = stats_of(harness)
    assert stats.hit_tokens == 48
    assert stats.num_loaded == 3
    (first, *_) = [each for each in harness.outputs if each.request == again.key.request]
    assert first.num_cached_tokens == 48
    harness.check_empty()


def _entered(harness: Harness, request: EngineCoreRequest):
    assert harness.add(request) is None
    (sequence,) = harness.core.scheduler.request_table.groups[request.key].live.values()
    return sequence


def test_a_load_lets_others_run_and_they_wait_for_none():
    """While it is under way others are computed; when they are through, a step waits for it."""
    harness = offloading(num_blocks=12)
    again = cold(harness)
    harness.executor.memory.steps_to_land = 3
    harness.add(again)
    other = request_of("z", 20, params=params_of(max_tokens=2, ignore_eos=True))
    harness.add(other)
    harness.step()
    assert harness.core.stats()["loading"] == 1
    assert harness.core.stats()["running"] == 1
    harness.run()
    for request in (again, other):
        harness.check(request)
    harness.check_empty()


def test_a_cancel_in_mid_load_keeps_the_blocks_until_it_has_landed():
    harness = offloading()
    again = cold(harness)
    harness.executor.memory.steps_to_land = 2
    harness.add(again)
    blocker = request_of("y", 10, params=LONG)
    harness.add(blocker)
    harness.step()
    assert harness.core.abort(again.key)
    assert harness.core.stats()["held_blocks"] == 4
    harness.run()
    assert harness.core.stats()["held_blocks"] == 0
    harness.check(blocker)
    harness.check_empty()


def test_a_budget_that_ends_in_mid_load_frees_likewise():
    """TIMEOUT for the router, its blocks once nothing writes them."""
    harness = offloading()
    again = cold(harness)
    harness.executor.memory.steps_to_land = 5
    harness.add(request_of("b", list(again.prompt_token_ids), budget_ms=5))
    harness.step()
    harness.step()
    assert [each.cause for each in harness.failed] == [FailCause.TIMEOUT]
    harness.run()
    harness.check_empty()


def test_a_failed_load_is_computed_and_not_tried_again():
    """The request goes back to its place in the queue; what could not be read is forgotten, and
    routers hear of it."""
    harness = offloading()
    again = cold(harness)
    harness.executor.memory.broken = True
    before = len(harness.stored)
    harness.add(again)
    harness.step()
    assert len(harness.stored) == before - 3
    assert set(harness.core.cached_blocks().stored) == harness.stored
    harness.executor.memory.broken = False
    harness.run()

    harness.check(again)
    stats = stats_of(harness)
    assert (stats.num_failed_loads, stats.hit_tokens) == (1, 0)
    harness.check_empty()


def test_what_was_preempted_comes_back_from_host_memory():
    """Two requests that cannot both stay: the one that goes is not computed from the start."""
    harness = offloading(num_blocks=6, num_cpu_blocks=40)
    params = params_of(max_tokens=40, ignore_eos=True)
    pair = [request_of(name, 40, params=params) for name in "ab"]
    for request in pair:
        harness.add(request)
    harness.run()
    for request in pair:
        harness.check(request)
    assert stats_of(harness).hit_tokens > 0
    harness.check_empty()


def test_a_step_is_made_for_transfers_alone():
    """A request that is loaded whole but for a block: the step that carries its load has no row,
    and without anything to carry there is no step."""
    harness = offloading()
    again = cold(harness)
    harness.add(again)
    scheduler = harness.core.scheduler
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.rows == ()
    assert isinstance(plan.transfers, BlockTransfers)
    assert len(plan.transfers.loads) == 1
    scheduler.update_from_output(harness.executor.execute(plan).result())
    following = scheduler.schedule()
    assert following is not None
    assert [row.num_computed for row in following.rows] == [48]
    assert following.transfers is None
    scheduler.update_from_output(harness.executor.execute(following).result())
    harness.run()


def test_reset_empties_both_and_routers_hear():
    """The command drops what is cached and what is offloaded; nothing is found afterwards."""
    harness = offloading()
    again = cold(harness)
    reply = harness.core.call(Command(id=1, name=CommandName.RESET_PREFIX_CACHE))
    assert reply.ok
    assert harness.core.stats()["offloaded_blocks"] == 0
    harness.add(again)
    harness.run()
    assert stats_of(harness).hit_tokens == 0
    harness.check(again)
    harness.check_empty()


def test_a_tier_too_small_for_all_keeps_the_latest():
    """Two host blocks: the rest is lost, counted, and routers do not count on it."""
    harness = offloading(num_cpu_blocks=2)
    again = cold(harness)
    assert harness.core.stats()["offloaded_blocks"] == 2
    assert stats_of(harness).num_evicted > 0
    harness.add(again)
    harness.run()
    harness.check(again)
    harness.check_empty()


def test_what_is_about_to_be_loaded_is_not_given_away():
    """Taking blocks for a load evicts others, which would push it out of a tier that is full."""
    harness = offloading(num_cpu_blocks=3)
    again = cold(harness)
    harness.add(again)
    harness.run()
    stats = stats_of(harness)
    assert stats.hit_tokens == 48
    assert stats.num_declined > 0
    harness.check(again)
    harness.check_empty()


def test_routers_hear_of_what_is_in_neither():
    """A hash that the tier gives away is gone, unless the cache has it, too."""
    manager = KVCacheManager(1, 16)
    log = manager.log
    (block,) = manager.pool.take(1)
    manager.pool.cache(block, BlockHash(b"b" * 16))
    log.drain()
    tier = OffloadConnector(LRUBlocks(1), manager=manager, block_bytes=1)
    told = []
    for digest in (b"a" * 16, b"b" * 16, b"c" * 16):
        tier.on_evict(0, BlockHash(digest))
        events = log.drain()
        assert events is not None
        told.append((events.stored, events.removed))
    assert told == [
        ((b"a" * 16,), ()),
        ((b"b" * 16,), (b"a" * 16,)),
        ((b"c" * 16,), ()),
    ]


def test_nothing_is_loaded_twice_for_a_request_whose_load_failed():
    """Even if what it wants is there again by then: a tier that is broken ends at one try."""
    harness = offloading()
    request = cold(harness)
    again = _entered(harness, request)
    harness.executor.memory.broken = True
    harness.step()
    assert stats_of(harness).num_failed_loads == 1
    tier = harness.core._offload
    assert tier is not None
    tier.on_evict(0, again.hashes_upto(1)[0])
    assert tier.lookup(again, 0).lookup is Lookup.NOTHING
    assert tier.transfers(idle=False) is not None
    harness.run()
    harness.check(request)
    assert stats_of(harness).num_failed_loads == 1


def test_metrics_show_the_tier():
    """Bytes both ways, tokens, blocks that made room; a collector reads them, no step does."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="tiny", max_model_len=1000)
    harness = offloading(num_cpu_blocks=8, metrics=metrics)
    again = cold(harness)
    harness.add(again)
    harness.run()
    size = harness.core.capacity.layout.block_bytes
    stats = stats_of(harness)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "tiny", "engine": "0"} | labels)

    moved = "vllm:kv_offload_total_bytes_total"
    assert value(moved, transfer_type="GPU_to_CPU") == stats.num_stored * size > 0
    assert value(moved, transfer_type="CPU_to_GPU") == 3 * size
    assert value("tandem:kv_offload_hit_tokens_total") == 48
    assert value("tandem:kv_offload_evicted_blocks_total") == stats.num_evicted
    assert value("tandem:kv_offload_failed_loads_total") == 0
    assert value("vllm:kv_offload_stores_skipped_total") == 0
    used = harness.core.stats()["offloaded_blocks"] / 8
    assert value("vllm:kv_offload_cpu_cache_usage_perc") == used > 0.5
    source = "vllm:prompt_tokens_by_source_total"
    assert value(source, source="external_kv_transfer") == 48
    assert value("vllm:prompt_tokens_total") == 60 + 75 + 60
    assert value(source, source="local_compute") == 60 + 75 + 12


def test_an_engine_with_a_tier_alone_hands_nothing_over():
    """The tier is no connector of a hand-off: such requests are refused as before."""
    harness = offloading()
    for request in (produce("p"), consume("c")):
        assert harness.add(request) is not None
    harness.run()
    harness.check_empty()


def test_a_hand_off_waits_for_what_its_blocks_held():
    """D's peer writes out of order with steps: it begins once the step is through that copies out
    what the reserved blocks held, and the tier has it whole."""
    pair = Pair(d_blocks=5, num_cpu_blocks=20)
    warm = request_of("warm", 60, params=LONG)
    pair.d.add(warm)
    pair.d.run()
    pair.prefill("a", 60)
    request = consume("a", 60)
    pair.d.add(request)
    pair.consumer.ready[request.key] = 60
    plan = pair.d.core.scheduler.schedule()
    assert plan is not None
    assert plan.transfers is not None
    assert plan.transfers.stores
    assert request.key not in pair.consumer.loads
    pair.d.core.scheduler.update_from_output(pair.d.executor.execute(plan).result())
    assert request.key in pair.consumer.loads
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)

    again = request_of("warm-again", list(warm.prompt_token_ids), params=LONG)
    pair.d.add(again)
    pair.d.run()
    pair.d.check(again)
    assert stats_of(pair.d).hit_tokens == 48
    pair.check_empty()


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (2, 2), (20, 3)])
def test_a_hand_off_waits_for_stores_that_go_on_beside_steps(count, steps):
    """The tokens of a step are there, what blocks of the hand-off held is not read yet: its fence
    says so. Where nobody runs any more, a step that computes nothing waits for it."""
    pair = Pair(d_blocks=8, num_cpu_blocks=20)
    warm = request_of("warm", 100, params=LONG)
    pair.d.add(warm)
    pair.d.run()
    pair.prefill("a", 60)
    other = request_of("other", 5, params=params_of(max_tokens=count, ignore_eos=True))
    pair.d.add(other)
    pair.d.step()
    request = consume("a", 60)
    pair.d.executor.memory.asks_to_store = 3
    pair.d.add(request)
    pair.consumer.ready[request.key] = 60
    for _ in range(steps):
        assert request.key not in pair.consumer.loads
        assert pair.d.step().progressed
    assert request.key in pair.consumer.loads
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.d.check(other)

    again = request_of("warm-again", list(warm.prompt_token_ids), params=LONG)
    pair.d.add(again)
    pair.d.run()
    pair.d.check(again)
    assert stats_of(pair.d).hit_tokens >= 48
    pair.check_empty()


def test_p_hands_over_what_it_loads():
    """A prompt that P has offloaded: loaded, its tail computed, all of it announced."""
    pair = Pair(p_blocks=5, num_cpu_blocks=20)
    prompt = cold(pair.p).prompt_token_ids
    pair.prefill("h", list(prompt))
    assert stats_of(pair.p).hit_tokens == 48
    request = pair.reserve("h", list(prompt))
    pair.d.step()
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.check_empty()


def test_offloading_wants_a_cache():
    """Without prefix caching nothing would ever be offloaded."""
    with pytest.raises(InvalidParameter, match=r"kv_offloading_size.*enable_prefix_caching"):
        CacheConfig(kv_offloading_size=1, enable_prefix_caching=False)
