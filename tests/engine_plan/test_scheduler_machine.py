"""Any order of arrivals, cancels, hand-offs and steps gives each request its own tokens.

The judge is ``SimModel.generate``, which computes one request alone. The pools are so small that
requests preempt each other, prompts share prefixes, and every step is followed by a check that
each block is held by exactly those who are known to hold it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec import structs
from tests.engine_plan.builders import (
    LAYERS,
    Harness,
    facts_of_layers,
    params_of,
    request_of,
)
from tests.engine_plan.grammars import HandCompiler, constrained
from tests.engine_plan.handoff import BothSides

from tandem.engine.config import ModelFacts
from tandem.protocol.card import KVKind
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.kv import FirstToken, Loaded
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams, PoolingType
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce

PEER = Incarnation(b"d" * 16)
ANSWERS = (
    "20 21 22 23 24 25",
    "1 2|1 3 4 5 6 8 9|9",
    " ".join(str(20 + at % 30) for at in range(45)),
    "x",
)
EXAMPLES = int(os.environ.get("TANDEM_SCHEDULER_EXAMPLES", "80"))

prompts = st.builds(
    lambda start, shared, own: [*range(start, start + shared), *own],
    st.sampled_from((0, 10)),
    st.sampled_from((0, 5, 16, 17, 32, 40)),
    st.lists(st.integers(0, 49), min_size=1, max_size=20),
)
params = st.builds(
    params_of,
    n=st.sampled_from((1, 1, 1, 2, 3)),
    temperature=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from((1, 2, 5, 17, 40, None)),
    min_tokens=st.sampled_from((0, 0, 1)),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, None, 1)),
    prompt_logprobs=st.sampled_from((None, None, None, 1)),
    stop_token_ids=st.sampled_from(((), (3, 4, 5))),
)


class SchedulerMachine(RuleBasedStateMachine):
    """An engine with a connector, stepped and disturbed."""

    @initialize(
        num_blocks=st.integers(5, 14),
        budget=st.sampled_from((3, 16, 64)),
        overlap=st.booleans(),
        caching=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")),
        seats=st.sampled_from((1, 2, 4, 16)),
        watermark=st.sampled_from((0.0, 0.1)),
        offloaded=st.sampled_from((0, 1, 4, 30)),
        layers=st.sampled_from(sorted(LAYERS)),
        window=st.sampled_from((2, 16, 20, 40)),
        drafts=st.sampled_from((0, 2, 6)),
    )
    def build(
        self, num_blocks, budget, overlap, caching, policy, seats, watermark, offloaded, layers,
        window, drafts,
    ):  # fmt: skip
        """An engine of some shape, with host memory behind its blocks or without."""
        facts = facts_of_layers(layers, window)
        longest, num_blocks = 16 * num_blocks, num_blocks * len(LAYERS[layers])
        self.sides = BothSides()
        self.compiler = HandCompiler()
        self.gate = self.compiler.gate()
        self.harness = Harness(
            num_blocks,
            connector=self.sides,
            gate=lambda: self.gate,
            max_num_batched_tokens=budget,
            async_scheduling=overlap,
            enable_prefix_caching=caching,
            policy=policy,
            max_num_seqs=seats,
            watermark=watermark,
            num_cpu_blocks=offloaded,
            facts=facts,
            max_model_len=longest,
            speculative_config=self._lookup(drafts, facts),
        )
        self.number = 0
        self.tenants = 1
        self.live: dict[RequestKey, EngineCoreRequest] = {}
        self.ended: dict[RequestKey, set[int]] = {}

    def _name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    def _add(self, request: EngineCoreRequest) -> None:
        request = structs.replace(request, tenant=f"t{self.number % self.tenants}")
        code = self.harness.add(request)
        assert code in (None, RefusalCode.NEVER_FITS)
        if code is None:
            self.live[request.key] = request

    @rule(prompt=prompts, params=params, priority=st.integers(0, 2))
    def add(self, prompt, params, priority):
        self._add(request_of(self._name(), prompt, params=params, priority=priority))

    @rule(
        prompt=prompts,
        answers=st.sampled_from(ANSWERS),
        n=st.sampled_from((1, 2)),
        seed=st.integers(0, 3),
        most=st.sampled_from((1, 3, 40)),
    )
    def add_constrained(self, prompt, answers, n, seed, most):
        """A request under a grammar, or with one that does not compile."""
        params = constrained(answers, n=n, temperature=1.0, seed=seed, max_tokens=most)
        self._add(request_of(self._name(), prompt, params=params))
        self._let_threads_end()

    @rule(prompt=prompts, kind=st.sampled_from(PoolingType), priority=st.integers(0, 2))
    def pool(self, prompt, kind, priority):
        fields = {"pooling": PoolingParams(pooling_type=kind), "priority": priority}
        self._add(request_of(self._name(), prompt, params=NO_SAMPLING, **fields))

    @rule()
    def compiling(self):
        """What compiles, and what makes masks, stands still or goes on again."""
        self.compiler.hold(self.compiler.may.is_set())
        self._let_threads_end()

    @rule(prompt=prompts, params=params, data=st.data())
    def resume(self, prompt, params, data):
        """A request whose earlier attempt emitted some tokens of each choice."""
        whole = request_of(self._name(), prompt, params=params)
        if len(prompt) >= self.harness.core.max_model_len:
            return
        tokens = [self.harness.oracle(whole, choice)[0] for choice in range(params.n)]
        kept = [data.draw(st.integers(0, len(each))) for each in tokens]
        ended = tuple(
            choice for choice, each in enumerate(tokens) if each and kept[choice] == len(each)
        )
        if len(ended) == params.n:
            return
        self._add(
            request_of(
                whole.key.request,
                prompt,
                params=params,
                emitted=tuple(tuple(each[:size]) for each, size in zip(tokens, kept, strict=True)),
                finished_choices=ended,
            )
        )

    @rule(prompt=prompts, params=params, side=st.sampled_from((Produce(PEER), Consume(PEER))))
    def hand_off(self, prompt, params, side):
        self._add(request_of(self._name(), prompt, params=params, kv=side))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        """A client goes away, wherever its request is, even if it has just ended."""
        key = data.draw(st.sampled_from(sorted(self.live)))
        self.harness.core.abort(key)
        del self.live[key]

    @precondition(lambda self: any(each.params.n > 1 for each in self.live.values()))
    @rule(data=st.data())
    def end_choices(self, data):
        """A client has what it wants of some choices, wherever their request is."""
        several = [key for key, each in self.live.items() if each.params.n > 1]
        key = data.draw(st.sampled_from(sorted(several)))
        ended = self.ended[key] = self.ended.get(key, set()) | data.draw(st.sets(st.integers(0, 3)))
        self.harness.core.end_choices(key, ended)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self._step()
            self._let_threads_end()

    @rule(tenants=st.sampled_from((1, 2, 3)))
    def share(self, tenants):
        """Requests of so many tenants come from now on."""
        self.tenants = tenants

    @rule(drafts=st.none() | st.tuples(st.integers(1, 6), st.integers(1, 5)))
    def draft(self, drafts):
        """The ranks propose so many tokens from now on, some of them wrong; or none."""
        self.harness.executor.guess = drafts if self.harness.config.scheduler.lookup else None

    def _lookup(self, drafts: int, facts: ModelFacts) -> str | None:
        if not drafts or facts.linear is not None:
            return None
        return json.dumps({"method": "ngram", "num_speculative_tokens": drafts})

    def _step(self) -> bool:
        return self.harness.step().progressed

    @rule()
    def reset(self):
        """The prefix cache is dropped in the middle of everything."""
        self.harness.core.manager.reset_prefix_cache()

    @rule(steps_to_land=st.integers(0, 3), asks=st.integers(0, 3), broken=st.booleans())
    def host_memory(self, steps_to_land, asks, broken):
        """Loads from host memory take so many steps from now on, and may all fail; so does what
        goes there, for whoever waits."""
        memory = self.harness.executor.memory
        memory.steps_to_land, memory.broken, memory.asks_to_store = steps_to_land, broken, asks

    @rule(data=st.data())
    def remote(self, data):
        """One thing happens on the wire, if anything can."""
        choices = self._wire()
        if choices:
            act, key = data.draw(st.sampled_from(choices))
            act(key)

    def _wire(self) -> list[tuple[Any, RequestKey]]:
        consumer, producer = self.sides.consumer, self.sides.producer
        parked = [
            (self._ready, key)
            for key, request in self.live.items()
            if isinstance(request.kv, Consume) and key not in consumer.ready
        ]
        loading = [
            (act, key)
            for key in sorted(consumer.loading - consumer.pending)
            for act in (self._deliver, self._fail)
        ]
        aborted = [(consumer.release, key) for key in sorted(consumer.pending)]
        exported = [(self._release, key) for key in sorted(producer.pending)]
        return [*parked, *loading, *aborted, *exported]

    def _ready(self, key: RequestKey) -> None:
        self.sides.consumer.ready[key] = len(self.live[key].prompt_token_ids)

    def _chain(self, tokens: list[int]) -> list[int | None]:
        model = self.harness.executor.model
        states: list[int | None] = []
        for token in tokens:
            states.append(model.write(states[-1] if states else None, token))
        return states

    def _deliver(self, key: RequestKey) -> None:
        """The bytes that a right producer would have sent, and its first tokens."""
        request = self.harness.requests[key]
        tables, tokens = self.sides.consumer.loads[key]
        states = self._chain(request.prompt_token_ids)
        executor = self.harness.executor
        executor.fill_tables(tables, tokens, states)
        state = states[-1]
        assert state is not None
        ends = request.eos_token_ids
        first = tuple(
            FirstToken(choice, executor.model.draw(state, request.params, choice, 0, ends))
            for choice in range(request.params.n)
        )
        self.sides.consumer.loading.discard(key)
        self.sides.consumer.events.append(Loaded(key, first))

    def _fail(self, key: RequestKey) -> None:
        self.sides.consumer.fail(key)
        self.live.pop(key, None)

    def _release(self, key: RequestKey) -> None:
        """A lease ends; what was promised is still there, to the last byte."""
        export = self.sides.producer.exports[key]
        request = self.harness.requests[key]
        states = self._chain(request.prompt_token_ids)[: export.upto]
        executor = self.harness.executor
        for group, table in zip(executor.groups, export.tables, strict=False):
            if export.why == "abort" and group.kind is not KVKind.FULL:
                continue  # a later chunk has moved the window, or written the state
            found = executor.read(table, executor.visible(group, export.upto))
            assert found == executor.expected(group, states)
        if export.why != "abort":
            assert export.upto == len(request.prompt_token_ids)
        self.sides.producer.release(key)

    @invariant()
    def holders_are_known(self):
        """Every block is free or held by exactly those who should hold it."""
        if hasattr(self, "harness"):
            self.harness.core.check_integrity()
            assert not self.harness.failed or set(self._failed_names()).isdisjoint(self._names())
            stats = self.harness.core.stats()
            seats = self.harness.config.scheduler.max_num_seqs
            assert stats["running"] + stats["loading"] <= seats

    def _failed_names(self) -> list[str]:
        return [each.request for each in self.harness.failed]

    def _names(self) -> list[str]:
        return [key.request for key in self.live]

    def teardown(self) -> None:
        """Everything that is left ends, everybody got the right tokens, and nothing is held."""
        if not hasattr(self, "harness"):
            return
        self.compiler.hold(False)
        idle = 0
        for _ in range(5000):
            moves = self._wire()
            for act, key in moves:
                if act != self._fail:
                    act(key)
            idle = 0 if self._step() or moves else idle + 1
            if not self.harness.core.has_work:
                break
            self._let_threads_end()
            assert idle < 3, "work is left and nothing moves"
        assert not self.harness.core.has_work
        for request in self.live.values():
            self._check(request)
        self.harness.check_empty()

    def _let_threads_end(self) -> None:
        """Nothing here depends on which thread is faster: all have done what they may."""
        if self.compiler.may.is_set():
            self.compiler.wait(self.gate, self.harness)

    def _check(self, request: EngineCoreRequest) -> None:
        if request.pooling is not None:
            self.harness.check_pooled(request)
            return
        wanted = request.params.structured_outputs
        if wanted is not None:
            self._check_constrained(request, wanted.regex or "")
        elif not isinstance(request.kv, Produce):
            ended = (*request.finished_choices, *self.ended.get(request.key, ()))
            self.harness.check(structs.replace(request, finished_choices=ended))
        else:
            for choice in range(request.params.n):
                expected, _ = self.harness.oracle(request, choice)
                assert self.harness.tokens(request.key.request, choice) == expected[:1]
        if wanted is None and not isinstance(request.kv, Consume):
            self._check_prompt_logprobs(request)

    def _check_constrained(self, request: EngineCoreRequest, answers: str) -> None:
        """An answer of the grammar, whole unless it is too long; or a refusal, and nothing else."""
        name, most = request.key.request, request.params.max_tokens or 0
        refused = [each.request for each in self.harness.refused].count(name)
        assert refused == (not answers[0].isdigit())
        whole = [tuple(map(int, each.split())) for each in answers.split("|") if not refused]
        ended = self.ended.get(request.key, set())
        for choice in set(range(0 if refused else request.params.n)) - ended:
            said = tuple(self.harness.tokens(name, choice))
            cut = {each[:most] for each in whole}
            limit = self.harness.core.max_model_len - len(request.prompt_token_ids)
            assert said in cut | {each[:limit] for each in cut}
            assert self.harness.finish(name, choice) == ("stop" if said in whole else "length")

    def _check_prompt_logprobs(self, request: EngineCoreRequest) -> None:
        mine = [out for out in self.harness.outputs if out.request == request.key.request]
        told = [out.prompt_logprobs for out in mine if out.prompt_logprobs is not None]
        if request.params.prompt_logprobs is None:
            assert told == []
        elif not request.emitted and not request.finished_choices:
            assert len(told) == 1
            assert len(told[0]) == len(request.prompt_token_ids)
            self._compare(request, told[0])

    def _compare(self, request: EngineCoreRequest, told: Any) -> None:
        model, tokens = self.harness.executor.model, request.prompt_token_ids
        count = request.params.prompt_logprobs or 0
        expected = [
            model.logprobs(state or 0, token, count)
            for state, token in zip(self._chain(tokens), tokens[1:], strict=False)
        ]
        assert list(told) == [None, *expected]


def test_outputs_are_typed():
    harness = Harness()
    harness.add(request_of("a"))
    harness.run()
    assert all(isinstance(each, EngineCoreOutput) for each in harness.outputs)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
