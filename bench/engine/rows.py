"""Rows of several tokens on one GPU: step times, and n-gram drafts: python bench/engine/rows.py.

Prints the time of a step in its CUDA graph and of the head for 1, 32 and 64 rows of 1, 2, 4 and 8
tokens, the gaps between tokens of other rows while requests arrive or are resumed, then tokens a
second with and without drafts, on answers that repeat themselves, on sampled text of the whole
vocabulary, and on text of 64 tokens, whose n-grams return and predict nothing.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rig import DUMMY, ROUTER, Rig

from tandem.engine.step import NewSequence, SeqId
from tandem.engine.worker.inputs import StepInputs
from tandem.engine.worker.step_rows import StepRows
from tandem.kernels.measure.timing import replay_us
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

CONTEXT, TOKENS = 1024, 256
LOOKUP = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2}
ALPHABETS = {"one token": (1234,), "vocabulary": None, "64 tokens": tuple(range(1000, 1064))}


def staged(rig: Rig, rows: list[int], width: int) -> StepInputs:
    """Return a step of ``width`` tokens after CONTEXT others for each of these rows."""
    runner, counts = rig.core._executor.worker.runner, np.full(len(rows), width, dtype=np.int64)
    decodes = len(rows) if width == 1 else 0
    index = np.array(rows, dtype=np.int64)
    step = StepRows(
        index, np.full(len(rows), CONTEXT), counts, decodes, int(counts.sum()), drafted=not decodes
    )
    wanted = None if decodes else np.arange(step.num_tokens)
    fit = partial(runner.graphs.fit, whole=True)
    inputs = runner.stager.stage(step, wanted, index, fit)
    assert inputs.padded, f"no class for {width} tokens in {len(rows)} rows"
    return inputs


def ms(run: Callable[[], object]) -> float:
    """Return the median ms of 20 calls after 5."""
    found = []
    for at in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        if at >= 5:
            found.append(begin.elapsed_time(end))
    return float(np.median(found))


@torch.inference_mode()
def times(rig: Rig) -> None:
    """Print the times of steps."""
    runner, draws = rig.core._executor.worker.runner, random.Random(3)
    each = -(-(CONTEXT + 64) // runner.batch.block_size)
    rows = []
    for number in range(64):
        tokens = draws.choices(range(1000, 150_000), k=CONTEXT + 64)
        blocks = list(range(number * each, (number + 1) * each))
        params = SamplingParams(temperature=0.0, seed=0)
        new = NewSequence(SeqId(10**9 + number), tokens, 8, params, 0, (), (blocks,))
        rows.append(runner.batch.add(new))
    for count in (1, 32, 64):
        one = 0.0
        for width in (1, 2, 4, 8):
            inputs = staged(rig, rows[:count], width)
            graph = ms(partial(runner.graphs.replay, inputs.shape))
            hidden = runner.graphs.replay(inputs.shape)[: count * width].clone()
            head = replay_us(partial(runner.model.logits, hidden), 1) / 1000
            one = one or graph + head
            ratio = (graph + head) / one
            print(f"{count:3} rows of {width}: {graph:.3f} + {head:.3f} ms, {ratio:.3f} of one")
    for number in range(64):
        runner.batch.drop(SeqId(10**9 + number))


def rate(rig: Rig, rows: int, allowed: tuple[int, ...] | None) -> float:
    """Return tokens a second of ``rows`` sequences that sample ``allowed`` tokens."""
    draws = random.Random(5)
    for number in range(rows):
        params = SamplingParams(
            temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True,
            allowed_token_ids=allowed,
        )  # fmt: skip
        prompt = draws.choices(allowed or range(1000, 150_000), k=512)
        key = RequestKey(ROUTER, f"{rows}-{time.monotonic_ns()}-{number}", 0)
        request = EngineCoreRequest(key=key, prompt_token_ids=prompt, params=params)
        assert rig.core.add(request) is None
    started = time.perf_counter()
    while rig.core.has_work:
        rig.core.advance()
    return rows * TOKENS / (time.perf_counter() - started)


def gaps(rig: Rig, emitted: int) -> tuple[float, float]:
    """Return p50 and p99 of the ms between tokens of 32 sequences while 16 requests arrive. These
    have 1,024 tokens, of which the last ``emitted`` are an earlier attempt's."""
    draws, times = random.Random(7), list[float]()

    def add(name: str, prompt: int, count: int, resumed: int = 0) -> None:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=count, ignore_eos=True)
        tokens = draws.choices(range(1000, 150_000), k=prompt)
        key = RequestKey(ROUTER, f"{name}-{time.monotonic_ns()}", 0)
        before = (tuple(draws.choices(range(1000, 150_000), k=resumed)),) if resumed else ()
        request = EngineCoreRequest(key=key, prompt_token_ids=tokens, params=params, emitted=before)
        assert rig.core.add(request) is None

    for _ in range(32):
        add("stream", CONTEXT, 400)
    steps, last = 0, 0.0
    while rig.core.has_work:
        outputs = [out for each in rig.core.advance().outputs.values() for out in each]
        streams = sum(each.request.startswith("stream") for each in outputs)
        now = time.perf_counter()
        if streams == 32 and last:
            times.append(now - last)
        last = now if streams else last
        steps += 1
        if steps > 40 and steps % 20 == 0 and steps <= 360:
            add("other", 1024 - emitted, emitted + 2, emitted)
    return tuple(1000 * float(np.percentile(times, each)) for each in (50, 99))


def main() -> None:
    """Measure and print."""
    found: dict[tuple[str, int], list[float]] = {}
    for drafts in (json.dumps(LOOKUP), None):
        rig = Rig.start(DUMMY, layers=None, num_gpu_blocks_override=2048, speculative_config=drafts)
        if drafts:
            times(rig)
        else:
            gaps(rig, 0)
            for emitted in (0, 512, 0, 512):
                p50, p99 = gaps(rig, emitted)
                print(f"{emitted} tokens resumed: {p50:.2f} and {p99:.2f} ms between tokens")
        for name, allowed in ALPHABETS.items():
            for rows in (1, 32):
                rate(rig, rows, allowed)
                best = max(rate(rig, rows, allowed) for _ in range(2))
                found.setdefault((name, rows), []).append(best)
        rig.core.close()
        del rig
        torch.cuda.empty_cache()
    for (name, rows), (with_drafts, without) in found.items():
        ratio = with_drafts / without
        print(f"{name}, {rows} rows: {with_drafts:.0f} and {without:.0f} tokens/s, {ratio:.3f}")


if __name__ == "__main__":
    main()
