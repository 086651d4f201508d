"""Pairs of engines of which one or both hold KV as codes: what D continues from, and its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.test_fp8_kv import scaled_folder
from tests.workers.pair import Half, Pair
from torch import Tensor

from tandem.kernels.narrow.codes import to_codes
from tandem.protocol.card import KVKind

LONG = tuple(3 + (11 * index + index // 7) % 300 for index in range(203))
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of OpenMP wait for each other by spinning, which takes long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pages(half: Half, tables: Sequence[Sequence[int]], tokens: range) -> dict[int, Tensor]:
    """Return K and V of these tokens by layer, [2, kv_heads, tokens, head_dim]."""
    runner = half.core._executor.worker.runner  # type: ignore[attr-defined]
    size = half.core.config.cache.block_size
    found = {}
    for each, table in zip(half.core.config.layer_groups, tables, strict=True):
        if each.group.kind is KVKind.FULL:
            for layer in each.layers:
                kv = runner.kv_cache.layers[layer]
                found[layer] = torch.stack(
                    [kv[table[at // size], :, :, at % size] for at in tokens], dim=2
                )
    return found


def hand_over(pair: Pair) -> tuple[dict[int, Tensor], dict[int, Tensor], list[int]]:
    """Return P's and D's KV of the prompt, and D's tokens."""
    tables: dict[str, Any] = {}
    computed, begin = pair.producer.computed, pair.consumer.begin_load

    def note_p(key: Any, given: Any, *rest: Any) -> None:
        tables["p"] = given
        computed(key, given, *rest)

    def note_d(key: Any, given: Any, *rest: Any) -> None:
        tables["d"] = given
        begin(key, given, *rest)

    pair.producer.computed = note_p  # type: ignore[assignment, method-assign]
    pair.consumer.begin_load = note_d  # type: ignore[assignment, method-assign]
    pair.ask("r", LONG, max_tokens=6)
    pair.until(lambda: pair.decode.finished("r") or bool(pair.decode.failed))
    assert not pair.decode.failed
    pair.until(lambda: not pair.prefill.core.has_work and not pair.decode.core.has_work)
    tokens = range(len(LONG))
    held = (pages(pair.prefill, tables["p"], tokens), pages(pair.decode, tables["d"], tokens))
    return (*held, pair.decode.tokens("r"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scaled")
    return {name: scaled_folder(name, root / name) for name in ("llama", "qwen3_5")}


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("types", [("auto", "fp8"), ("fp8", "auto"), ("fp8", "fp8")])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_consumer_holds_what_it_would_have_stored(family, types, sizes, folders):
    """By the scales of the checkpoint; states keep their type."""
    engine = {"folder": folders[family], "num_gpu_blocks_override": 160 * 16 // min(sizes)}
    pair = Pair(block_sizes=sizes, engine=engine, kv_types=types)
    try:
        theirs, mine, tokens = hand_over(pair)
        scales = pair.decode.core.config.kv_scales
        assert theirs
        for layer, given in theirs.items():
            scale = torch.tensor(scales[layer])[:, :, None, None]
            want = given
            if types == ("auto", "fp8"):
                want = to_codes(given, scale).view(FP8)
            elif types == ("fp8", "auto"):
                want = given.float() * scale
            assert mine[layer].dtype == want.dtype
            assert torch.equal(mine[layer].view(torch.uint8), want.view(torch.uint8))
        if types == ("fp8", "fp8"):
            alone = CPUEngine(folders[family], kv_cache_dtype="fp8", dtype="float32",
                              num_gpu_blocks_override=200)  # fmt: skip
            assert tokens == alone.generate([LONG], 6)[0]
        pair.decode.core.check_integrity()
        pair.prefill.core.check_integrity()
    finally:
        pair.close()
