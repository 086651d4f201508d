"""Paths of requests through one engine or a pair: each must give the tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference import Row
from tests.engine_run.cpu_engine import ROUTER, CPUEngine
from tests.workers.pair import Half, Pair

from tandem.engine.cache.groups import CacheGroups
from tandem.engine.config import EngineConfig
from tandem.engine.scheduler.request_table import RequestTable
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

GIB = 2**30


@dataclass(frozen=True)
class Served:
    """A model in float32 with the rows that each path asks for."""

    folder: Path
    rows: tuple[Row, ...]
    """Shortest first: eight of a block or two, and a last one of over two windows."""
    window: int
    chunk: int
    """Tokens of a step."""
    seconds: float = 20.0
    """Deadline of one request of a pair."""

    def settings(self, num_blocks: int | None = None, **more: Any) -> dict[str, Any]:
        blocks = num_blocks or self.num_blocks(sum(len(row.prompt) for row in self.rows))
        own = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": self.chunk}
        return {**own, **more}

    def num_blocks(self, *lengths: int, block_size: int = 16) -> int:
        """Return the blocks that sequences of these lengths hold together."""
        config = EngineConfig.of(self.folder, device="cpu", block_size=block_size)
        groups = CacheGroups.of(config.layout.groups, block_size, self.chunk)
        return sum(groups.num_blocks(length) for length in lengths)

    def engine(self, num_blocks: int | None = None, **more: Any) -> CPUEngine:
        settings = self.settings(num_blocks, **more)
        return CPUEngine(self.folder, dtype="float32", **settings)

    @contextmanager
    def pair(
        self, connector: str, sizes: tuple[int, int] = (16, 16), **more: Any
    ) -> Iterator[Pair]:
        settings = {"folder": self.folder, **self.settings(**more)}
        made = Pair(connector, block_sizes=sizes, engine=settings)
        made.seconds = self.seconds
        try:
            yield made
            made.prefill.core.check_integrity()
            made.decode.core.check_integrity()
        finally:
            made.close()

    def tier(self, *rows: Row) -> dict[str, Any]:
        """Return settings of an engine with room for the longest row, and six times that in host
        memory."""
        longest = max(len(row.prompt) + len(row.tokens) for row in rows)
        num_blocks = self.num_blocks(longest) + 8
        config = EngineConfig.of(self.folder, device="cpu", dtype="float32")
        size = 6 * num_blocks * config.layout.block_bytes / GIB
        return {"num_gpu_blocks_override": num_blocks, "kv_offloading_size": size}


def check(row: Row, tokens: Sequence[int], known: int = 0) -> None:
    """Compare the tokens after the first ``known`` ones."""
    verdict = row.verdict([*row.tokens[:known], *tokens])
    assert verdict in ("equal", "excused"), verdict


def answer(engine: CPUEngine, rows: Sequence[Row]) -> None:
    """Ask for all rows at once and check them."""
    count = len(rows[0].tokens)
    for row, tokens in zip(rows, engine.generate([row.prompt for row in rows], count), strict=True):
        check(row, tokens)
    engine.core.check_integrity()


def handed_over(
    pair: Pair, name: str, row: Row, known: int = 0, preempt_after: int | None = None
) -> None:
    """Ask both legs for the row, of which the first ``known`` tokens were sent, and check it. D
    preempts it after ``preempt_after`` tokens."""
    emitted = [row.tokens[:known]] if known else []
    count = len(row.tokens)
    budget_ms = round(1000 * pair.seconds)
    pair.ask(name, row.prompt, emitted, budget_ms=budget_ms, max_tokens=count, ignore_eos=True)
    if preempt_after is not None:
        pair.until(lambda: len(pair.decode.tokens(name)) >= preempt_after)
        requests = pair.decode.core.scheduler.request_table
        requests.preempt(requests.running.pop())
    pair.until(lambda: pair.decode.finished(name) or bool(pair.decode.failed))
    assert not pair.decode.failed
    pair.until(lambda: not pair.prefill.core.has_work and not pair.decode.core.has_work)
    check(row, pair.decode.tokens(name), known)


def aggregated(served: Served) -> None:
    """All rows at once, in chunks, next to each other's decodes."""
    answer(served.engine(), served.rows)


def prefix_hits(served: Served) -> None:
    """Prefixes of lengths inside, at and over a window are found, and continued."""
    row, window = served.rows[-1], served.window
    engine = served.engine()
    for cut in (17, window - 1, window + 20, 2 * window, len(row.prompt) - 1):
        engine.generate([row.prompt[:cut]], 1)
        engine.cached.clear()
        answer(engine, [row])
        (hit,) = engine.cached.values()
        assert (cut - 1) // 16 * 16 <= hit <= cut // 16 * 16
        engine.core.manager.reset_prefix_cache()


@contextmanager
def counted_preemptions() -> Iterator[list[int]]:
    """Yield the computed tokens of the sequences that are preempted from now on."""
    preempt, found = RequestTable.preempt, []

    def noted(self: RequestTable, request: Any) -> None:
        found.append(request.num_computed)
        preempt(self, request)

    RequestTable.preempt = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        RequestTable.preempt = preempt  # type: ignore[method-assign]


def preempted(served: Served, **settings: Any) -> None:
    """The prompts fill the pool. Short answers grow, so the long request is preempted."""
    rows = (*served.rows[:8], served.rows[-1])
    num_blocks = served.num_blocks(*(len(row.prompt) for row in rows))
    tight = {"watermark": 0.0, "least_mixed_tokens": served.chunk}
    engine = served.engine(num_blocks, **tight, **settings)
    with counted_preemptions() as found:
        answer(engine, rows)
    assert max(found, default=0) > served.window


def offloaded(served: Served) -> None:
    """Rows evict each other from the device, and come back from host memory."""
    rows = served.rows[-3:]
    engine = served.engine(**served.tier(*rows))
    for _ in range(2):
        answer(engine, rows)
    assert_loaded(engine, served.window)


def assert_loaded(engine: CPUEngine | Half, num_tokens: int) -> None:
    tier = engine.core._offload
    assert tier is not None
    assert tier.stats.hit_tokens >= num_tokens
    assert not tier.stats.num_failed_loads


def resumed(served: Served) -> None:
    """Tokens of an earlier attempt are not computed as output again."""
    engine, row = served.engine(), served.rows[-2]
    count = len(row.tokens)
    for known in (1, count // 2, count - 1):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=count, ignore_eos=True)
        key = RequestKey(ROUTER, f"resumed-{known}", 0)
        request = EngineCoreRequest(
            key=key,
            prompt_token_ids=list(row.prompt),
            params=params,
            emitted=(tuple(row.tokens[:known]),),
        )
        assert engine.core.add(request) is None
        check(row, engine.run()[key.request], known)
        engine.core.manager.reset_prefix_cache()


def handoff(served: Served, connector: str) -> None:
    """Cold; with the prompt cached on both ends; on one end; after an earlier attempt."""
    row, other = served.rows[-1], served.rows[-3]
    with served.pair(connector) as pair:
        handed_over(pair, "cold", row)
        assert pair.consumer.progress() > 0
        handed_over(pair, "cached", row)
        pair.decode.core.manager.reset_prefix_cache()
        handed_over(pair, "cached at P", row)
        handed_over(pair, "resumed", other, known=len(other.tokens) // 2)
        pair.prefill.core.manager.reset_prefix_cache()
        handed_over(pair, "cached at D", row)


def unequal(served: Served, connector: str) -> None:
    """Blocks of P are smaller or larger than those of D; cold and with hits."""
    for sizes in ((16, 64), (64, 16)):
        with served.pair(connector, sizes) as pair:
            handed_over(pair, "cold", served.rows[-2])
            handed_over(pair, "cached", served.rows[-2])


def preempted_at_d(served: Served, connector: str) -> None:
    """A prompt that was handed over is computed again at D, and so is what D decoded."""
    with served.pair(connector) as pair, counted_preemptions() as found:
        handed_over(pair, "preempted", served.rows[-1], preempt_after=5)
    assert max(found, default=0) > served.window


def offloaded_by_both(served: Served, connector: str) -> None:
    """Rows evict each other from P and D. P hands over what comes from host memory, and D continues
    what it computed itself."""
    rows = served.rows[-3:]
    with served.pair(connector, **served.tier(*rows)) as pair:
        for turn in ("cold", "offloaded"):
            for row in rows:
                handed_over(pair, f"{turn} {len(row.prompt)}", row)
            for row in rows:
                pair.decode.outputs.clear()
                (tokens,) = pair.alone(row.prompt, max_tokens=len(row.tokens), ignore_eos=True)
                check(row, tokens)
        assert_loaded(pair.prefill, served.window)
        assert_loaded(pair.decode, served.window)


def drafted(served: Served, connector: str, drafts: str) -> None:
    """D verifies drafts after a hand-off, after an earlier attempt's tokens and a preemption."""
    more: dict[str, Any] = {"speculative_config": drafts, "async_scheduling": True}
    with served.pair(connector, **more) as pair:
        for row in served.rows[-2:]:
            length, half = len(row.prompt), len(row.tokens) // 2
            handed_over(pair, f"cold {length}", row)
            handed_over(pair, f"resumed {length}", row, known=half)
            handed_over(pair, f"preempted {length}", row, preempt_after=half)


ENGINE_PATHS: dict[str, Callable[[Served], None]] = {
    each.__name__: each for each in (aggregated, prefix_hits, preempted, offloaded, resumed)
}
PAIR_PATHS: dict[str, Callable[[Served, str], None]] = {
    each.__name__: each for each in (handoff, unequal, preempted_at_d, offloaded_by_both)
}
PAIR_CASES = (
    ("handoff", "tcp"),
    ("handoff", "shm"),
    ("unequal", "tcp"),
    ("unequal", "shm"),
    ("preempted_at_d", "shm"),
    ("offloaded_by_both", "shm"),
)
"""Paths of pairs with a connector."""
