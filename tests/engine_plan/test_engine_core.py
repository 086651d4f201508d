"""The step loop: overlap, commands, reports, routers that vanish, and leaks that are found."""

from concurrent.futures import Future

import pytest
from tests.engine_plan.builders import ROUTER, Harness, config_of, params_of, request_of
from tests.engine_plan.handoff import ConsumerSide, ProducerSide
from tests.engine_plan.pair import consume, produce
from tests.engine_plan.sim import SimExecutor

from tandem.engine.cache.block_pool import IntegrityError
from tandem.engine.core.engine_core import QUIET_S, EngineCore
from tandem.engine.scheduler.stats import PrefillRate
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.card import WorkerRole
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import Incarnation


class LateExecutor(SimExecutor):
    """Gives a step's result only when it is asked for, and notes in which order things happen."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, verify=True)
        self.log: list[str] = []

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.log.append(f"launch {plan.step}")
        log, done = self.log, super().execute(plan)

        class Read(Future[ModelRunnerOutput]):
            def result(self, timeout: float | None = None) -> ModelRunnerOutput:
                log.append(f"read {plan.step}")
                return done.result(timeout)

        return Read()


def engine_of(executor: SimExecutor, **flat: object) -> EngineCore:
    """An engine over an executor of one's own."""
    return EngineCore.launch(config_of(**flat), executor)


def test_one_step_is_read_before_the_next_is_launched():
    """Without async scheduling a step is over before the call returns."""
    executor = LateExecutor(16)
    core = engine_of(executor)
    core.add(request_of("a", params=params_of(max_tokens=3, ignore_eos=True)))
    while core.has_work:
        core.step()

    assert executor.log == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]


def test_two_steps_are_in_flight_under_overlap():
    """With async scheduling step N+1 is launched before step N is read, and none is wasted when
    the length is known."""
    executor = LateExecutor(16)
    core = engine_of(executor, async_scheduling=True)
    core.add(request_of("a", params=params_of(max_tokens=3, ignore_eos=True)))
    while core.has_work:
        core.step()

    assert executor.log == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]


def test_an_end_found_late_discards_the_extra_token():
    """A stop token is seen a step late; what the extra step drew is never said."""
    for overlap in (False, True):
        harness = Harness(async_scheduling=overlap)
        request = request_of("a", params=params_of(stop_token_ids=tuple(range(50))))
        harness.add(request)
        harness.run()
        harness.check(request)
        assert harness.core.stats()["steps"] == 1 + overlap
        harness.check_empty()


def test_outputs_are_grouped_by_router():
    """Each router hears of its own requests alone, in one message a step."""
    harness = Harness()
    harness.core.add(request_of("a", router=b"1" * 16))
    harness.core.add(request_of("b", router=b"2" * 16))
    harness.core.add(request_of("c", router=b"2" * 16, budget_ms=5))
    harness.clock.now += 1

    heard = {router: (outputs, failed) for router, outputs, failed in harness.step().by_router()}

    assert [out.request for out in heard[Incarnation(b"1" * 16)][0]] == ["a"]
    outputs, failed = heard[Incarnation(b"2" * 16)]
    assert ([out.request for out in outputs], [each.request for each in failed]) == (["b"], ["c"])


def test_hole_16_a_lost_router_takes_its_requests_along():
    """Requests are tied to the router's incarnation."""
    harness = Harness()
    for name in "ab":
        harness.core.add(request_of(name))
    harness.core.add(request_of("c", router=b"2" * 16))
    harness.step()

    assert harness.core.abort_router(ROUTER) == 2
    (left,) = harness.core.keys()
    assert left.request == "c"
    assert harness.core.holds(left)
    harness.run()
    harness.check_empty()


def test_draining_takes_nothing_new_and_finishes_the_rest():
    """DRAIN refuses newcomers; what runs gets its tokens."""
    harness = Harness()
    request = request_of("a")
    harness.add(request)

    assert harness.core.call(Command(id=3, name=CommandName.DRAIN)).ok
    assert harness.add(request_of("b")) is RefusalCode.DRAINING
    assert harness.core.load_report().draining
    harness.run()
    harness.check(request)


def test_the_prefix_cache_can_be_dropped():
    """RESET_PREFIX_CACHE forgets what nobody holds, and tells the routers."""
    harness = Harness()
    harness.add(request_of("a", 40))
    harness.run()
    assert harness.stored

    reply = harness.core.call(Command(id=7, name=CommandName.RESET_PREFIX_CACHE))

    assert (reply.id, reply.ok, reply.values) == (7, True, {"dropped_blocks": 2.0})
    harness.step()
    assert not harness.stored
    harness.check_empty()


def test_the_prefix_cache_is_kept_while_peers_use_it():
    """While KV is promised, exported or on its way, a reset is refused."""
    reset = Command(id=1, name=CommandName.RESET_PREFIX_CACHE)
    exporting = Harness(connector=(side := ProducerSide()))
    request = produce("a")
    exporting.add(request)
    assert not exporting.core.call(reset).ok
    exporting.step()
    assert exporting.core.stats()["held_requests"] == 1
    assert not exporting.core.call(reset).ok
    side.release(request.key)
    exporting.run()
    assert exporting.core.call(reset).ok

    loading = Harness(connector=(other := ConsumerSide()))
    leg = consume("a")
    loading.add(leg)
    other.ready[leg.key] = 40
    loading.step()
    assert not loading.core.call(reset).ok


def test_stats_and_load_say_what_is_there():
    """Counts of requests, tokens and blocks, by where they are."""
    harness = Harness(8, max_num_batched_tokens=32, connector=(side := ConsumerSide()))
    harness.add(request_of("run", 70))
    legs = [consume("park"), consume("load", 16)]
    for leg in legs:
        harness.add(leg)
    harness.add(request_of("wait", 60))
    harness.step()
    side.ready[legs[1].key] = 16
    harness.step()

    stats = harness.core.call(Command(id=1, name=CommandName.STATS)).values
    assert [stats[name] for name in ("running", "waiting", "parked", "loading")] == [1, 1, 1, 1]
    assert (stats["free_blocks"], stats["total_blocks"], stats["steps"]) == (1, 8, 2)
    load = harness.core.load_report()
    assert (load.num_running, load.num_waiting) == (1, 3)
    assert (load.waiting_tokens, load.loading_tokens) == (6 + 60 + 40 + 16, 40 + 16)
    assert (load.free_blocks, load.total_blocks, load.leased_blocks) == (1, 8, 0)


def test_the_prefill_rate_is_measured():
    """Prompt tokens over the time that their steps took."""
    harness = Harness()
    execute = harness.executor.execute

    def slow(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        done = execute(plan)

        class Timed(Future[ModelRunnerOutput]):
            def result(self, timeout: float | None = None) -> ModelRunnerOutput:
                harness.clock.now += 0.5
                return done.result(timeout)

        return Timed()

    harness.executor.execute = slow  # type: ignore[method-assign]
    harness.add(request_of("a", 60))
    assert harness.core.load_report().prefill_tokens_per_s == 0
    harness.step()
    assert harness.core.load_report().prefill_tokens_per_s == pytest.approx(120)
    harness.run()
    assert harness.core.load_report().prefill_tokens_per_s == pytest.approx(120)


def test_short_prompts_do_not_hide_how_fast_long_ones_are():
    """A step of 16 tokens takes nearly as long as one of 2,048; the rate is that of the tokens."""
    rate = PrefillRate()
    assert rate.tokens_per_s == 0
    for _ in range(20):
        rate.note(16, 0.007)
    rate.note(2048, 0.044)
    assert rate.tokens_per_s == pytest.approx(2048 / 0.044)


def test_steps_that_build_kernels_do_not_hide_how_fast_an_engine_is():
    """A first step may take seconds; the third after it has the rate right."""
    rate = PrefillRate()
    rate.note(2048, 5.0)
    for _ in range(2):
        rate.note(2048, 0.044)
    assert rate.tokens_per_s == pytest.approx(2048 / 0.044)
    for _ in range(40):
        rate.note(2048, 0.088)
    assert rate.tokens_per_s == pytest.approx(2048 / 0.088)


def test_the_card_says_what_is_served():
    """Lengths are those of this engine, not of the model alone."""
    core = engine_of(SimExecutor(8), served_model_name="tiny", max_num_seqs=5)

    card = core.card(role=WorkerRole.PREFILL, control="host:1")

    assert (card.model, card.max_model_len, card.num_blocks, card.block_size) == (
        "tiny",
        128,
        8,
        16,
    )
    assert (card.max_num_seqs, card.vocab_size, card.control) == (5, 50, "host:1")
    assert card.fingerprint == core.fingerprint
    assert card.prefix_caching


def test_requests_without_a_seed_get_one():
    """The same in each run, and another for each request."""
    runs = []
    for _ in range(2):
        harness = Harness()
        params = params_of(seed=None, temperature=1.0, ignore_eos=True)
        for name in ("a", "b"):
            harness.add(request_of(name, [1, 2, 3], params=params))
        harness.run()
        runs.append([harness.tokens("a"), harness.tokens("b")])

    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_leak_ends_the_engine_when_it_is_idle():
    """A block that nobody holds and nobody can use is found at the end of the work."""
    harness = Harness()
    harness.add(request_of("a"))
    harness.step()
    harness.core.manager.pool.take(1)

    with pytest.raises(IntegrityError):
        harness.run()


def test_every_block_is_looked_at_once_it_is_quiet():
    """A block in the wrong list, of which the count alone says nothing, ends the engine later."""
    harness = Harness()
    harness.add(request_of("a"))
    harness.run()
    harness.core.manager.pool._references[3] += 1
    harness.core.step()

    harness.clock.now += 2 * QUIET_S
    with pytest.raises(IntegrityError):
        harness.core.step()


def test_errors_of_the_executor_reach_the_shell():
    """A step that failed is raised from ``step``; the engine does not guess."""
    harness = Harness()
    harness.add(request_of("a"))
    failed: Future[ModelRunnerOutput] = Future()
    failed.set_exception(RuntimeError("out of memory"))
    harness.executor.execute = lambda plan: failed  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="out of memory"):
        harness.step()


def test_connectors_are_made_for_what_the_executor_holds():
    """``launch`` starts the executor first, and hands its capacity to the role."""
    seen = []
    core = EngineCore.launch(
        config_of(), SimExecutor(9), connect=lambda capacity: seen.append(capacity)
    )

    assert seen == [core.capacity]
    assert core.capacity.num_blocks == 9
    core.close()
