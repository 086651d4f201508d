"""A producing and a consuming engine over hand-driven services, for the connector tests."""

from __future__ import annotations

from typing import Any

from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.handoff import ConsumerSide, ProducerSide
from tests.waiting import Deadline

from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce

P, D = Incarnation(b"p" * 16), Incarnation(b"d" * 16)


def produce(name: str, prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
    return request_of(name, prompt, kv=Produce(D), **fields)


def consume(name: str, prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
    return request_of(name, prompt, kv=Consume(P), **fields)


class Pair:
    def __init__(
        self,
        p_blocks: int = 64,
        d_blocks: int = 64,
        *,
        p_len: int | None = None,
        d_len: int | None = None,
        **flat: Any,
    ) -> None:
        """``p_len``, ``d_len``: max_model_len of either; None is the model's."""
        self.producer, self.consumer = ProducerSide(), ConsumerSide()
        self.p = Harness(p_blocks, connector=self.producer, max_model_len=p_len, **flat)
        self.d = Harness(d_blocks, connector=self.consumer, max_model_len=d_len, **flat)

    def prefill(self, name: str = "a", prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
        """Run the prefill leg to its end; its blocks stay exported."""
        request = produce(name, prompt, **fields)
        assert self.p.add(request) is None
        deadline = Deadline(every=0.001)
        while self.p.core.holds(request.key):
            if not self.p.step().progressed:
                self.p.rest()  # a grammar is compiled
            deadline.check(self.p.core.stats)
        return request

    def reserve(self, name: str = "a", prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
        """Start the decode leg up to its load."""
        request = consume(name, prompt, **fields)
        assert self.d.add(request) is None
        self.consumer.ready[request.key] = len(self.prompt_of(request))
        self.d.step()
        return request

    @staticmethod
    def prompt_of(request: EngineCoreRequest) -> list[int]:
        """Prompt and forced tokens of the first choice."""
        return [*request.prompt_token_ids, *request.emitted_of(0)]

    def deliver(self, request: EngineCoreRequest) -> None:
        """Bring the KV of a request and end its lease."""
        export = self.producer.exports[request.key]
        assert export.first is not None
        self.consumer.deliver(
            request.key,
            export.first,
            source=self.p.executor,
            blocks=export.tables,
            target=self.d.executor,
        )
        self.producer.release(request.key)

    def check_empty(self) -> None:
        """Both engines hold nothing, and finished() was called once for each admitted key."""
        for harness in (self.p, self.d):
            harness.run()
            harness.check_empty()
        for side in (self.producer, self.consumer):
            admitted = sorted(key for call, key in side.calls if call == "admit")
            finished = sorted(key for call, key in side.calls if call == "finished")
            assert admitted == finished


def merged(pair: Pair, request: EngineCoreRequest, choice: int) -> list[int]:
    """The router's log of one choice: first write wins, and rewrites must agree."""
    log: dict[int, int] = {}
    outputs: list[EngineCoreOutput] = [*pair.p.outputs, *pair.d.outputs]
    for output in outputs:
        if (output.request, output.choice) == (request.key.request, choice):
            for offset, token in enumerate(output.token_ids):
                assert log.setdefault(output.position + offset, token) == token
    return [token for _, token in sorted(log.items())]
