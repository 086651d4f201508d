"""Requests whose tokens a grammar bounds: when the scheduler plans them, and how they end."""

from __future__ import annotations

import pytest
from tests.engine_plan.builders import EOS, Harness, params_of, request_of
from tests.engine_plan.grammars import HandCompiler, constrained, run, step_until
from tests.engine_plan.pair import Pair, consume, merged

from tandem.engine.core import engine_core
from tandem.engine.scheduler.constrained import MASK_SECONDS
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.kv import FirstToken, Loaded

ANSWERS = "1 2 3 4 5 6|1 2 9|8 8 8 8|20 21 22 23 24 25 26 27"
ALLOWED = [[int(token) for token in each.split()] for each in ANSWERS.split("|")]


@pytest.fixture
def compiler() -> HandCompiler:
    return HandCompiler()


@pytest.fixture
def no_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for their masks, however slow the machine is that makes them."""
    monkeypatch.setattr(engine_core, "LEAST_S", 30.0)
    monkeypatch.setattr(engine_core, "MOST_S", 30.0)


@pytest.mark.parametrize("steps_ahead", [False, True])
def test_answers_are_of_the_grammar_and_others_are_as_alone(
    compiler: HandCompiler, steps_ahead: bool
):
    engine = Harness(gate=compiler.gate, async_scheduling=steps_ahead)
    bound = [
        request_of(f"g{seed}", params=constrained(ANSWERS, temperature=1.0, seed=seed))
        for seed in range(6)
    ]
    free = [request_of(f"f{n}", params=params_of(max_tokens=12)) for n in range(6)]
    for pair in zip(bound, free, strict=True):
        for each in pair:
            engine.add(each)
    run(engine)

    for each in free:
        engine.check(each)
    for each in bound:
        assert engine.tokens(each.key.request) in ALLOWED
        assert engine.finish(each.key.request) == "stop"
    engine.check_empty()


@pytest.mark.usefixtures("no_mask_is_late")
def test_a_row_is_in_every_step(compiler: HandCompiler):
    """Two steps in flight: it is planned before its last token is known, and drawn behind it, if
    its mask is not late."""
    gate = compiler.gate()
    engine = Harness(gate=lambda: gate, async_scheduling=True)
    engine.add(request_of("g", params=constrained("1 2 3 4 5 6 8 9", max_tokens=None)))
    compiler.wait(gate, engine)
    engine.add(request_of("f", params=params_of(max_tokens=600, ignore_eos=True)))
    step_until(engine, lambda: len(engine.tokens("g")) == 1)
    plans = []
    while not engine.finish("g"):
        engine.step()
        plan, *_ = engine.core._in_flight[-1]
        plans.append((plan.awaits_masks, len(plan.rows)))

    assert len(plans) == 7
    assert set(plans) == {(True, 2)}
    run(engine)


def test_a_step_of_which_all_is_late_is_computed_again(compiler: HandCompiler):
    """With nobody beside it; each token comes once, and as it would have."""
    answer = "1 2 3 4 5 6 8 9"
    engine = Harness(gate=compiler.gate, async_scheduling=True)
    engine.add(request_of("g", params=constrained(answer, max_tokens=None)))
    step_until(engine, lambda: len(engine.tokens("g")) == 2)
    compiler.masks.clear()
    steps = 0
    while engine.step().progressed:
        steps += 1
        assert steps < 10
    assert engine.tokens("g") in ([1, 2], [1, 2, 3])
    compiler.masks.set()
    run(engine)

    assert engine.tokens("g") == [int(token) for token in answer.split()]
    engine.check_empty()


@pytest.mark.usefixtures("no_mask_is_late")
def test_rows_that_are_all_constrained_go_together(compiler: HandCompiler):
    """Steps of half of them, one behind the other, would take as long and give half."""
    engine = Harness(gate=compiler.gate, async_scheduling=True)
    answer = " ".join(["20"] * 40)
    compiler.may.clear()
    for at in range(8):
        engine.add(request_of(f"a{at}", params=constrained(answer, max_tokens=None)))
        if at % 2:
            compiler.may.set()
            step_until(engine, lambda: engine.core.stats()["running"])
    step_until(engine, lambda: engine.core.stats()["running"] == 8)
    rows = []
    while engine.core.stats()["running"] == 8:
        engine.step()
        rows += [len(plan.rows) for plan, *_ in list(engine.core._in_flight)[-1:]]
    run(engine)

    assert rows.count(8) > 0.8 * len(rows)
    assert all(engine.tokens(f"a{at}") == [20] * 40 for at in range(8))


def test_a_preempted_answer_goes_on_where_it_was(compiler: HandCompiler):
    """Blocks run out: whoever is preempted is computed again, and its grammar has not moved."""
    engine = Harness(9, gate=compiler.gate, async_scheduling=True)
    answer = [20 + at % 30 for at in range(60)]
    for name in "abc":
        params = constrained(" ".join(map(str, answer)), max_tokens=100)
        engine.add(request_of(name, 8, params=params))
    groups = list(engine.core.scheduler.request_table.groups.values())
    run(engine)

    assert any(group.num_preemptions for group in groups)
    assert [engine.tokens(name) for name in "abc"] == [answer] * 3
    engine.check_empty()


def test_choices_follow_the_grammar_apart(compiler: HandCompiler):
    """n=3 from one prompt: each goes its way."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("a", params=constrained(ANSWERS, n=3, temperature=1.0, seed=4)))
    run(engine)

    said = [engine.tokens("a", choice) for choice in range(3)]
    assert all(each in ALLOWED for each in said)
    assert len({tuple(each) for each in said}) > 1
    assert {engine.finish("a", choice) for choice in range(3)} == {"stop"}
    engine.check_empty()


def test_an_answer_may_end_by_the_models_own_end(compiler: HandCompiler):
    """Where the grammar accepts and goes on, the end is among what may come; not under
    ``ignore_eos``."""
    engine = Harness(gate=compiler.gate)
    for seed in range(12):
        params = constrained("1|1 2 3", temperature=1.0, seed=seed)
        engine.add(request_of(f"a{seed}", params=params))
        params = constrained("1|1 2 3", temperature=1.0, seed=seed, ignore_eos=True)
        engine.add(request_of(f"b{seed}", params=params))
    run(engine)

    said = {tuple(engine.tokens(f"a{seed}")) for seed in range(12)}
    assert said == {(1, *EOS), (1, 2, 3)}
    assert {tuple(engine.tokens(f"b{seed}")) for seed in range(12)} == {(1, 2, 3)}


def test_a_length_ends_an_answer_unless_it_is_complete(compiler: HandCompiler):
    """max_tokens cuts; an answer that is complete with its last token has stopped."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("cut", params=constrained("1 2 3", max_tokens=2)))
    engine.add(request_of("whole", params=constrained("1 2 3", max_tokens=3)))
    engine.add(request_of("one", params=constrained("1", max_tokens=1)))
    run(engine)

    assert (engine.tokens("cut"), engine.finish("cut")) == ([1, 2], "length")
    assert (engine.tokens("whole"), engine.finish("whole")) == ([1, 2, 3], "stop")
    assert (engine.tokens("one"), engine.finish("one")) == ([1], "stop")


def test_an_end_that_the_mask_shows_ends_the_answer(compiler: HandCompiler):
    """A backend may see only with the mask that nothing can follow."""
    compiler.late = True
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("a", params=constrained("1 2 3", ignore_eos=True)))
    run(engine)

    assert (engine.tokens("a"), engine.finish("a")) == ([1, 2, 3], "stop")
    engine.check_empty()


def test_a_slow_mask_delays_its_own_row_alone(compiler: HandCompiler):
    """Others are planned in every step meanwhile; past a deadline the request is refused."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("g", params=constrained("1 2 3 4")))
    step_until(engine, lambda: engine.core.stats()["running"])
    compiler.masks.clear()
    other = request_of("f")
    engine.add(other)
    step_until(engine, lambda: engine.finish("f"))
    engine.check(other)
    said = engine.tokens("g")
    assert said in ([1], [1, 2])
    engine.step()
    engine.clock.now += MASK_SECONDS
    engine.step()

    (refused,) = engine.refused
    assert refused.refusal.param == "structured_outputs.regex"
    assert engine.tokens("g") == said
    assert not engine.core.has_work
    compiler.masks.set()
    engine.check_empty()


def test_a_grammar_that_gives_up_ends_its_request_alone(compiler: HandCompiler):
    """The backend's limits: a refusal in its words."""
    compiler.hopeless = 2
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("g", params=constrained("1 2 3 4")))
    other = request_of("f")
    engine.add(other)
    run(engine)

    assert engine.tokens("g") == [1, 2]
    assert engine.refused[0].refusal.message.endswith("too complex")
    engine.check(other)
    engine.check_empty()


@pytest.mark.parametrize(
    ("emitted", "more", "finish"),
    [((1,), [2, 3], "stop"), ((1, 2), [3], "stop"), ((1, 2, 3), [], "stop")],
)
def test_an_attempt_goes_on_after_forced_tokens(
    compiler: HandCompiler, emitted: tuple[int, ...], more: list[int], finish: str
):
    """The grammar follows them first; where they complete it, nothing is drawn."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("a", params=constrained("1 2 3|4"), emitted=(emitted,)))
    run(engine)

    assert (engine.tokens("a"), engine.finish("a")) == (more, finish)
    assert engine.outputs[0].position == len(emitted)
    engine.check_empty()


def test_choices_that_go_on_apart_follow_their_own_tokens(compiler: HandCompiler):
    """A resume with n=2 whose choices have said different things, one of them its end."""
    engine = Harness(gate=compiler.gate)
    params = constrained("1 2 3|4 5 6", n=3)
    emitted = ((1,), (4, 5), (1, 2, 3))
    engine.add(request_of("a", params=params, emitted=emitted))
    run(engine)

    assert [engine.tokens("a", choice) for choice in range(3)] == [[2, 3], [6], []]
    assert {engine.finish("a", choice) for choice in range(3)} == {"stop"}


def test_forced_tokens_that_do_not_fit_are_refused(compiler: HandCompiler):
    """They were not drawn under this grammar."""
    engine = Harness(gate=compiler.gate)
    engine.add(request_of("a", params=constrained("1 2 3"), emitted=((1, 9),)))
    run(engine)

    assert "9 after (1,)" in engine.refused[0].refusal.message
    engine.check_empty()


@pytest.mark.parametrize("n", [1, 2])
def test_a_handoff_goes_on_with_the_first_token(compiler: HandCompiler, n: int):
    """P draws token 1 of each choice under the grammar, D follows it and goes on."""
    pair = Pair(gate=compiler.gate)
    params = constrained(ANSWERS, n=n, temperature=1.0, seed=3)
    request = consume("a", params=params)
    pair.d.add(request)
    pair.prefill("a", params=params)
    pair.consumer.ready[request.key] = 40
    step_until(pair.d, lambda: request.key in pair.consumer.loads)
    pair.deliver(request)
    run(pair.p, pair.d)

    assert all(merged(pair, request, choice) in ALLOWED for choice in range(n))
    assert {pair.d.finish("a", choice) for choice in range(n)} == {"stop"}
    pair.check_empty()


@pytest.mark.parametrize("when", ["gated", "parked"])
def test_a_first_token_may_complete_the_answer(compiler: HandCompiler, when: str):
    """P says that it ended; D agrees, even while its own grammar is still compiled."""
    pair = Pair(gate=compiler.gate)
    pair.prefill("a", params=constrained("5"))
    assert (pair.p.tokens("a"), pair.p.finish("a")) == ([5], "stop")
    if when == "gated":
        compiler.may.clear()
    request = consume("a", params=constrained("5"))
    pair.d.add(request)
    if when == "parked":
        step_until(pair.d, lambda: pair.d.core.stats()["parked"])
    first = pair.producer.exports[request.key].first
    assert first is not None
    pair.consumer.events.append(Loaded(request.key, first, usable=False))
    pair.d.step()
    pair.d.step()

    assert (pair.d.tokens("a"), pair.d.finish("a")) == ([5], "stop")
    pair.producer.release(request.key)
    compiler.may.set()
    pair.check_empty()


def test_a_first_token_outside_the_grammar_fails_the_handoff(compiler: HandCompiler):
    """Token 1 of a worker that drew without it: D says so and goes on with nobody's answer."""
    pair = Pair(gate=compiler.gate)
    pair.prefill("a")
    request = consume("a", params=constrained("1 2"))
    pair.d.add(request)
    pair.consumer.ready[request.key] = 40
    step_until(pair.d, lambda: request.key in pair.consumer.loads)
    export = pair.producer.exports[request.key]
    export.first = (FirstToken(0, 3, None),)
    pair.deliver(request)
    run(pair.d)

    (failed,) = pair.d.failed
    assert failed.cause is FailCause.IDENTITY
    assert "token 3" in failed.message
    assert pair.d.outputs == []
    pair.check_empty()


@pytest.mark.parametrize(("drawn", "handed_over"), [(0, False), (2, False), (2, True)])
def test_a_limit_that_a_grammar_reaches_behind_a_token_is_the_clients(
    compiler: HandCompiler, drawn: int, handed_over: bool
):
    """A grammar that cannot follow a token of its own mask has reached a limit of the backend: the
    request is refused, and nothing counts against the worker."""
    pair, params = Pair(gate=compiler.gate), constrained("1 2 3 4 5", max_tokens=None)
    request = request_of("a", params=params)
    if handed_over:
        request = consume("a", params=params)
        pair.d.add(request)
        pair.prefill("a", params=params)
        pair.consumer.ready[request.key] = 40
        step_until(pair.d, lambda: request.key in pair.consumer.loads)
        compiler.fickle_at = drawn
        pair.deliver(request)
    else:
        compiler.fickle_at = drawn
        pair.d.add(request)
    run(pair.d)

    assert pair.d.failed == []
    (refused,) = pair.d.refused
    assert refused.refusal.code is RefusalCode.INVALID
    assert refused.refusal.param == "structured_outputs.regex"
    assert f"{drawn + 1} after" in refused.refusal.message
    assert pair.d.tokens("a") == ([1, 2, 3] if drawn else [])
    pair.check_empty()
