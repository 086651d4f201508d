"""What a request waits for before anything is reserved for it; nobody else waits because of it."""

from __future__ import annotations

import threading

import pytest
from tests.engine_plan.builders import VOCAB, Harness, params_of, request_of
from tests.engine_plan.grammars import SECONDS, HandCompiler, constrained, run, step_until
from tests.engine_plan.handoff import ProducerSide
from tests.engine_plan.pair import produce
from tests.waiting import wait_for

from tandem.engine.structured import StructuredOutputManager
from tandem.engine.structured.manager import COMPILE_SECONDS, MAX_GRAMMARS
from tandem.protocol.errors import RefusalCode


@pytest.fixture
def compiler() -> HandCompiler:
    return HandCompiler()


def test_a_slow_compile_delays_nobody_else(compiler: HandCompiler):
    """Later requests start and end while one waits at its gate, which holds no block."""
    engine = Harness(gate=compiler.gate, max_num_seqs=2)
    compiler.may.clear()
    engine.add(request_of("a", params=constrained("1 2 3")))
    others = [request_of(name) for name in "bcd"]
    for each in others:
        engine.add(each)
    step_until(engine, lambda: all(engine.finish(each.key.request) for each in others))

    stats = engine.core.stats()
    assert (stats["gated"], stats["waiting"], stats["running"]) == (1, 0, 0)
    assert engine.finish("a") is None
    compiler.may.set()
    run(engine)

    for each in others:
        engine.check(each)
    assert (engine.tokens("a"), engine.finish("a")) == ([1, 2, 3], "stop")
    engine.check_empty()


def test_an_open_gate_gives_the_place_that_the_arrival_gives(compiler: HandCompiler):
    """Who came first goes before those that wait since, though its grammar came late."""
    gate = compiler.gate()
    engine = Harness(gate=lambda: gate, max_num_seqs=1)
    compiler.may.clear()
    engine.add(request_of("a", params=constrained("1 2")))
    engine.add(request_of("b", params=params_of(max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.add(request_of("c"))
    ((gated, _),) = engine.core.scheduler.request_table.gates.waiting.values()
    compiler.may.set()
    wait_for(lambda: gate.ready(gated))
    run(engine)

    order = list(dict.fromkeys(output.request for output in engine.outputs))
    assert order == ["b", "a", "c"]
    engine.check_empty()


def test_who_waits_at_a_gate_counts_as_queued(compiler: HandCompiler):
    """The bound of the queue holds for gates, too, and a drain may give such a request back."""
    engine = Harness(gate=compiler.gate, max_num_queued_reqs=1)
    compiler.may.clear()
    request = request_of("a", params=constrained("1 2"))
    assert engine.add(request) is None

    assert engine.add(request_of("b")) is RefusalCode.CAPACITY
    assert engine.core.waiting_keys() == [request.key]
    assert engine.core.load_report().num_waiting == 1
    compiler.may.set()
    run(engine)


@pytest.mark.parametrize("how", ["opens", "cancel"])
def test_tokens_of_who_waits_at_a_gate_are_queued(compiler: HandCompiler, how: str):
    """Until it is let in and starts, or goes."""
    engine = Harness(gate=compiler.gate, max_num_queued_tokens=50)
    compiler.may.clear()
    request = request_of("a", 40, params=constrained("1 2"))
    assert engine.add(request) is None
    assert engine.add(request_of("b", 40)) is RefusalCode.CAPACITY
    if how == "cancel":
        engine.core.abort(request.key)
    compiler.may.set()
    run(engine)
    assert engine.add(request_of("b", 40)) is None
    run(engine)
    assert engine.core.scheduler.request_table.gates.num_tokens == 0


def test_a_compile_has_a_deadline(compiler: HandCompiler):
    """It ends by a refusal that names the field; what compiles on hurts nobody."""
    gate = compiler.gate()
    engine = Harness(gate=lambda: gate)
    compiler.may.clear()
    engine.add(request_of("a", params=constrained("1 2 3")))
    wait_for(lambda: not gate.is_preparing)
    engine.step()
    assert engine.refused == []
    engine.clock.now += COMPILE_SECONDS
    engine.step()

    (refused,) = engine.refused
    assert refused.request == "a"
    assert refused.refusal.code is RefusalCode.INVALID
    assert refused.refusal.param == "structured_outputs.regex"
    assert "within 10 s" in refused.refusal.message
    assert not engine.core.has_work
    compiler.may.set()
    after = request_of("b", params=constrained("1 2 3"))
    engine.add(after)
    run(engine)
    assert engine.tokens("b") == [1, 2, 3]
    engine.check_empty()


def test_what_is_made_once_is_not_charged_to_who_comes_first(compiler: HandCompiler):
    """A busy machine may take longer to read a tokenizer than a grammar may: then the grammar has
    its time, whole, and no more."""
    may = threading.Event()

    def made(name: str) -> HandCompiler:
        assert may.wait(SECONDS)
        return compiler

    gate = StructuredOutputManager(made, vocab_size=VOCAB)
    engine = Harness(gate=lambda: gate)
    compiler.may.clear()
    engine.add(request_of("a", params=constrained("1 2")))
    engine.clock.now += 3 * COMPILE_SECONDS
    engine.step()
    may.set()
    wait_for(lambda: not gate.is_preparing)
    engine.clock.now += 0.9 * COMPILE_SECONDS
    engine.step()
    assert engine.refused == []

    engine.clock.now += 0.1 * COMPILE_SECONDS
    engine.step()
    assert [each.request for each in engine.refused] == ["a"]
    compiler.may.set()


def one_thread(compiler: HandCompiler) -> StructuredOutputManager:
    """A gate behind which one text is compiled at a time."""
    return StructuredOutputManager(lambda name: compiler, vocab_size=VOCAB, threads=1)


def test_a_wait_for_others_is_no_fault_of_the_text(compiler: HandCompiler):
    """Whoever compiles is told that its text takes too long; whoever waits for a thread, that
    others were before it."""
    gate = one_thread(compiler)
    engine = Harness(gate=lambda: gate)
    compiler.may.clear()
    engine.add(request_of("a", params=constrained("1 2")))
    wait_for(lambda: not gate.is_preparing)
    engine.add(request_of("b", params=constrained("3 4")))
    engine.step()
    engine.clock.now += COMPILE_SECONDS
    engine.step()

    codes = {each.request: each.refusal.code for each in engine.refused}
    assert codes == {"a": RefusalCode.INVALID, "b": RefusalCode.CAPACITY}
    (late,) = [each.refusal for each in engine.refused if each.request == "b"]
    assert "compiled for 10 s before structured_outputs.regex" in late.message
    assert not engine.core.has_work
    compiler.may.set()


def test_a_compiler_that_has_no_room_is_no_fault_of_the_text(compiler: HandCompiler):
    """Nor one that was lost over it: another worker may take it."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("a", params=constrained("later")))
    run(engine)

    (refused,) = engine.refused
    assert refused.refusal.code is RefusalCode.CAPACITY
    assert refused.refusal.param == "structured_outputs.regex"
    assert refused.refusal.message.endswith("was not compiled: others take long")
    engine.check_empty()


def test_a_text_has_its_whole_time_once_it_is_begun(compiler: HandCompiler):
    gate = one_thread(compiler)
    engine = Harness(gate=lambda: gate)
    compiler.may.clear()
    engine.add(request_of("a", params=constrained("1 2")))
    wait_for(lambda: not gate.is_preparing)
    engine.add(request_of("b", params=constrained("3 4")))
    waiting = engine.core.scheduler.request_table.gates.waiting.values()
    first, behind = [each for each, _ in waiting]
    engine.step()
    engine.clock.now += 0.9 * COMPILE_SECONDS
    compiler.held = "3 4"
    compiler.may.set()
    wait_for(lambda: gate.ready(first) and not gate.waits(behind))
    engine.step()
    engine.clock.now += 0.9 * COMPILE_SECONDS
    step_until(engine, lambda: engine.finish("a"))
    assert engine.refused == []

    engine.clock.now += 0.1 * COMPILE_SECONDS
    engine.step()
    assert [each.refusal.code for each in engine.refused] == [RefusalCode.INVALID]
    compiler.let_go.set()


def test_what_nobody_waits_for_any_more_is_not_compiled(compiler: HandCompiler):
    """A text whose request has gone takes no thread from those behind it."""
    gate = one_thread(compiler)
    engine = Harness(gate=lambda: gate)
    compiler.may.clear()
    requests = [request_of(name, params=constrained(f"1 {at}")) for at, name in enumerate("abc")]
    for each in requests:
        engine.add(each)
    wait_for(lambda: not gate.is_preparing)
    assert engine.core.abort(requests[1].key)
    compiler.may.set()
    run(engine)
    assert compiler.compiled == ["1 0", "1 2"]
    engine.check_empty()


@pytest.mark.parametrize("how", ["cancel", "budget"])
def test_a_request_may_end_at_its_gate(compiler: HandCompiler, how: str):
    """A cancel or a spent budget releases it while it compiles, and nothing is told twice."""
    engine = Harness(gate=compiler.gate)
    compiler.may.clear()
    request = request_of("a", params=constrained("1 2"), budget_ms=1000)
    engine.add(request)
    engine.step()
    if how == "cancel":
        assert engine.core.abort(request.key)
    else:
        engine.clock.now += 1
        engine.step()
        assert [each.request for each in engine.failed] == ["a"]
    assert not engine.core.has_work
    compiler.may.set()
    run(engine)

    assert engine.outputs == []
    assert engine.refused == []
    engine.check_empty()


def test_what_does_not_compile_is_refused_with_the_backends_words(compiler: HandCompiler):
    """After the request was taken, as an answer to it and nothing more."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("a", params=constrained("x")))
    other = request_of("b")
    engine.add(other)
    run(engine)

    (refused,) = engine.refused
    assert refused.refusal.message.startswith("structured_outputs.regex: 'x' is not allowed; ")
    assert refused.refusal.message.endswith("what begins with a digit")
    assert engine.failed == []
    engine.check(other)
    engine.check_empty()


def test_a_grammar_goes_to_the_next_request_with_its_text(compiler: HandCompiler):
    """One at a time: whoever runs beside it has its own, and few are kept."""
    engine = Harness(gate=compiler.gate)
    for name in "ab":
        engine.add(request_of(name, params=constrained("1 2 3")))
    run(engine)
    assert compiler.compiled == ["1 2 3"] * 2
    for name in "cd":
        engine.add(request_of(name, params=constrained("1 2 3")))
    engine.add(request_of("e", params=constrained("4 5")))
    run(engine)
    assert sorted(compiler.compiled) == ["1 2 3"] * 2 + ["4 5"]
    assert [engine.tokens(name) for name in "abcde"] == [[1, 2, 3]] * 4 + [[4, 5]]

    for at in range(MAX_GRAMMARS + 2):
        engine.add(request_of("f", params=constrained(f"1 {at}")))
        run(engine)
    engine.add(request_of("g", params=constrained("1 2 3")))
    run(engine)
    assert compiler.compiled.count("1 2 3") == 3


def test_a_request_without_one_passes_at_once(compiler: HandCompiler):
    """It is in the queue when ``add`` returns; no thread is there for it."""
    engine = Harness(gate=compiler.gate)
    request = request_of("a")
    engine.add(request)

    group = engine.core.scheduler.request_table.groups[request.key]
    assert group.gates == ()
    assert len(engine.core.scheduler.request_table.waiting) == 1
    engine.run()
    engine.check(request)


def test_a_refused_handoff_lets_go_of_its_gate(compiler: HandCompiler):
    """The connector says no after the gate has begun: nothing is left of either."""
    side = ProducerSide(quota=0)
    gate = compiler.gate()
    engine = Harness(connector=side, gate=lambda: gate)
    compiler.may.clear()

    assert engine.add(produce("a", params=constrained("1 2"))) is RefusalCode.CAPACITY
    assert gate._begun == {}
    assert not engine.core.has_work
    compiler.may.set()


def test_a_closed_gate_closes_its_compiler(compiler: HandCompiler):
    """What a compiler has beside the process goes with the engine; nothing is compiled then."""
    gate = compiler.gate()
    engine = Harness(gate=lambda: gate)
    engine.add(request_of("a", params=constrained("1 2")))
    run(engine)
    gate.close()
    gate.close()
    assert compiler.closed
