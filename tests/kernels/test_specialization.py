"""Numbers that change from step to step never make a kernel be compiled anew.

Triton makes one more of a kernel where a number becomes 1 or a multiple of 16, and where a tensor
begins elsewhere than at 16 bytes; compiling takes a second, and a client would see it. Every
parameter of every kernel that is launched is named here, as one that Triton does not look at or as
one that is the same in each step of a model.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.kernels.hopper import use_hopper
from torch import Tensor
from triton.runtime.jit import JITFunction

import tandem.kernels
from tandem.kernels import Backend
from tandem.kernels.attention.batch import SHORT_ROWS, PagedBatch, Scores, short_batches
from tandem.kernels.attention.decode import gluon as decode_gluon
from tandem.kernels.attention.decode import plan as decode_plan
from tandem.kernels.attention.decode import triton as decode_triton
from tandem.kernels.attention.prefill import prefill
from tandem.kernels.blocks import add_digest, pack, unpack
from tandem.kernels.fp8_gemm import BLOCK, fp8_linear
from tandem.kernels.launch.ahead import building_ahead
from tandem.kernels.launch.launcher import Launcher
from tandem.kernels.moe import (
    ExpertActivation,
    ExpertWeights,
    RoutingRule,
    Scoring,
    expert_feed_forward,
    route,
)
from tandem.kernels.sampling import Filters, Penalties, penalize, score_tokens, thresholds

pytestmark = pytest.mark.full


class Params(NamedTuple):
    loose: str = ""
    """What a step changes, a number or where a tensor begins: Triton is to see its type alone."""
    numbers: str = ""
    """Of a model, its slab or its batch: the same in each step. Floats are never looked at."""
    tensors: str = ""
    """They begin where an allocation does, or whole aligned rows behind it."""


KERNELS = {
    "activation.triton_kernels:silu_and_mul_rows": Params(
        numbers="row_stride dim",
        tensors="gate_up out",
    ),
    "attention.bidirectional.triton_kernels:attend_tiles": Params(
        numbers="q_t q_h k_t k_h v_t v_h scale",
        tensors="q k v tiles out",
    ),
    "attention.decode.gluon_kernels:decode_stream": Params(
        loose="tables lengths starts table_row",
        numbers="q_t q_h block_rows two_rows head_rows scale",
        tensors="kv_desc tail_desc q out plan pieces stats arrivals kv_scales",
    ),
    "attention.decode.plan_kernels:plan_shares": Params(
        loose="lengths cu_seqlens_q block_tables num_seqs num_shares most_pieces table_row "
        "num_blocks",
        tensors="plan arrivals",
    ),
    "attention.decode.triton_kernels:decode_shares": Params(
        loose="block_tables lengths cu_seqlens_q table_row num_blocks",
        numbers="q_t q_h kv_block kv_two kv_head scale cap",
        tensors="q kv out plan pieces stats arrivals sinks slopes kv_scales",
    ),
    "attention.prefill.gluon_kernels:prefill_tiles": Params(
        loose="tables table_row",
        numbers="block_rows two_rows head_rows scale",
        tensors="q_desc kv_desc plan count out",
    ),
    "attention.prefill.plan_kernels:plan_tiles": Params(
        loose="cu_seqlens_q lengths num_seqs max_tiles",
        tensors="plan count",
    ),
    "attention.prefill.triton_kernels:prefill_tiles": Params(
        loose="tables table_row",
        numbers="q_t q_h kv_block kv_two kv_head scale cap",
        tensors="q kv plan count out sinks slopes kv_scales",
    ),
    "blocks.triton_kernels:add_terms": Params(
        loose="total words num_bytes",
        tensors="data low_keys high_keys",
    ),
    "blocks.triton_kernels:move_rows": Params(
        loose="source_ids target_ids",
        numbers="words PER_ROW",
        tensors="source target",
    ),
    "drafts.triton_kernels:accept_rows": Params(
        loose="rows spans token_ids last_tokens results n span",
        numbers="spare columns most",
        tensors="history lengths drafts",
    ),
    "drafts.triton_kernels:look_up_rows": Params(
        loose="rows counts",
        numbers="columns most_drafts",
        tensors="history lengths drafts",
    ),
    "drafts.triton_kernels:place_rows": Params(
        loose="rows lens chunk_starts token_ids positions blocks offsets seq_lens tables draws "
        "decodes tokens table_group table_row num_draws",
        numbers="most groups",
        tensors="history lengths drafts earlier",
    ),
    "fp8_gemm.triton_kernels:multiply_blocks": Params(
        loose="rows",
        numbers="outputs inner x_row weight_row scale_row",
        tensors="x weight scale bias out",
    ),
    "fp8_gemm.triton_kernels:multiply_many": Params(
        loose="rows scale_block",
        numbers="outputs inner scale_row residual_row",
        tensors="x_desc w_desc x_scale w_scale bias residual out partials counters",
    ),
    "fp8_gemm.triton_kernels:round_normed_rows": Params(
        loose="scale_block",
        numbers="inner x_row eps",
        tensors="x gain codes scales",
    ),
    "fp8_gemm.triton_kernels:round_rows": Params(
        loose="rows scale_block",
        numbers="inner x_row",
        tensors="x codes scales",
    ),
    "gemm.gluon_kernels:multiply_stream": Params(
        loose="rows length pieces w_block",
        numbers="outputs residual_row",
        tensors="w_desc x_desc scale_desc bias residual out partials counters x_scale w_scale",
    ),
    "gemm.triton_kernels:multiply_few": Params(
        loose="rows",
        numbers="outputs half x_row w_row residual_row inner",
        tensors="x w bias residual out partials counters",
    ),
    "gemm.triton_kernels:multiply_one": Params(
        numbers="w_row",
        tensors="x w bias residual out",
    ),
    "grouped_gemm.triton_kernels:add_parts": Params(
        loose="height",
        numbers="outputs residual_row",
        tensors="parts bias residual out",
    ),
    "grouped_gemm.triton_kernels:decode": Params(
        numbers="outputs inner codes_row scale_row zeros_row",
        tensors="codes scale zeros out",
    ),
    "grouped_gemm.triton_kernels:multiply_codes": Params(
        loose="rows height",
        numbers="outputs inner x_row codes_row scale_row zeros_row residual_row",
        tensors="x codes scale zeros bias residual out parts",
    ),
    "int8_gemm.triton_kernels:multiply_int8": Params(
        loose="rows height",
        numbers="outputs inner weight_row",
        tensors="x weight sums",
    ),
    "int8_gemm.triton_kernels:round_rows": Params(
        numbers="inner x_row",
        tensors="x codes scales",
    ),
    "int8_gemm.triton_kernels:scale_sums": Params(
        loose="height",
        numbers="outputs",
        tensors="sums of_rows scale bias out",
    ),
    "mla.triton_kernels:attend_expanded": Params(
        loose="tables lengths starts table_row begin room is_last",
        numbers="q_t q_h kv_block scale",
        tensors="q kv expanded out sums stats",
    ),
    "mla.triton_kernels:attend_latents": Params(
        loose="tables lengths starts table_row tokens splits",
        numbers="latent_t latent_h rope_t rope_h kv_block scale",
        tensors="q_latent q_rope kv out parts stats",
    ),
    "mla.triton_kernels:expand_latents": Params(
        loose="tables lengths table_row begin room",
        numbers="kv_block",
        tensors="kv kv_b expanded",
    ),
    "mla.triton_kernels:merge_splits": Params(
        loose="rows splits",
        tensors="parts stats out",
    ),
    "mla.triton_kernels:rotate_pairs": Params(
        numbers="q_t cos_row sin_row",
        tensors="q cos sin",
    ),
    "mla.triton_kernels:write_latents": Params(
        loose="blocks offsets",
        numbers="row_stride kv_block kv_token cos_row sin_row eps",
        tensors="kv_a kv cos sin weight",
    ),
    "moe.gluon_kernels:multiply_experts": Params(
        loose="rows w_block",
        numbers="outputs num_chosen tiles length half",
        tensors="w_desc x_desc scale_desc chosen slots factors w_scale bias out",
    ),
    "moe.plan_kernels:list_chosen": Params(
        loose="tokens",
        numbers="num_chosen",
        tensors="ids chosen slots",
    ),
    "moe.triton_kernels:add_routes": Params(
        numbers="width",
        tensors="found total",
    ),
    "moe.triton_kernels:multiply_down": Params(
        numbers="experts outputs inner",
        tensors="x weight scale bias routes starts factors out",
    ),
    "moe.triton_kernels:multiply_gate_up": Params(
        numbers="experts width inner x_row",
        tensors="x weight scale bias routes starts out",
    ),
    "moe.triton_kernels:place_routes": Params(
        loose="count",
        numbers="experts",
        tensors="ids routes starts",
    ),
    "moe.triton_kernels:route_rows": Params(
        numbers="row_stride groups size scale",
        tensors="logits bias ids weights",
    ),
    "norm.triton_kernels:add_layer_norm_rows": Params(
        numbers="x_row residual_row dim eps",
        tensors="x residual gain shift out",
    ),
    "norm.triton_kernels:norm_rows": Params(
        numbers="x_row dim eps",
        tensors="x weight out",
    ),
    "rotary_kv.triton_kernels:rotate_heads": Params(
        loose="blocks offsets",
        numbers="cos_row sin_row kv_block kv_two kv_head kv_token eps",
        tensors="qkv kv cos sin kv_scales q_weight k_weight",
    ),
    "sampling.bits.triton_kernels:keep_bits_of_rows": Params(
        numbers="row_stride word_stride vocabulary count",
        tensors="logits words rows",
    ),
    "sampling.columns.triton_kernels:gather_columns": Params(
        loose="rows draws n m",
        numbers="size",
        tensors="seeds top_k temperature min_p top_p wide narrow",
    ),
    "sampling.filters.triton_kernels:search_rows": Params(
        loose="cursors",
        numbers="vocab chunks",
        tensors="top_k top_p floors facts kinds partials found",
    ),
    "sampling.filters.triton_kernels:bound_rows": Params(
        loose="cursors",
        numbers="vocab groups",
        tensors="peaks masses min_p top_k top_p floors facts kinds",
    ),
    "sampling.filters.triton_kernels:gather_rows": Params(
        loose="cursors",
        numbers="row_stride vocab groups chunks",
        tensors="logits temperature peaks top_p facts kinds partials found",
    ),
    "sampling.filters.triton_kernels:weigh_rows": Params(
        numbers="row_stride vocab groups chunks",
        tensors="logits temperature peaks top_p facts kinds partials",
    ),
    "sampling.penalties.triton_kernels:penalize_pairs": Params(
        loose="pairs",
        numbers="row_stride",
        tensors="logits rows tokens counts repetition frequency presence",
    ),
    "sampling.race.triton_kernels:best_of_groups": Params(
        numbers="row_stride vocab groups",
        tensors="logits peaks tokens",
    ),
    "sampling.race.triton_kernels:group_stats": Params(
        numbers="row_stride vocab groups",
        tensors="logits temperature floor chosen peaks masses ranks",
    ),
    "sampling.race.triton_kernels:race": Params(
        numbers="row_stride vocab groups",
        tensors="logits temperature floor keys rows peaks masses tokens",
    ),
    "sampling.scores.triton_kernels:score_rows": Params(
        loose="top",
        numbers="row_stride vocab groups",
        tensors="logits ids peaks masses ranks logprobs rank top_ids top_logprobs",
    ),
    "tiled_gemm.gluon_kernels:multiply_tiles": Params(
        loose="rows length pieces",
        numbers="outputs residual_row",
        tensors="c_desc x_desc scales bias residual out partials counters",
    ),
    "tiled_gemm.triton_kernels:decode_tiles": Params(
        numbers="inner",
        tensors="words scales out",
    ),
}

EXPERTS = ExpertWeights(
    torch.zeros(4, 2 * BLOCK, BLOCK, dtype=torch.bfloat16),
    torch.zeros(4, BLOCK, BLOCK, dtype=torch.bfloat16),
)


def kernel_of(where: str) -> Any:
    """What ``triton.jit`` or ``gluon.jit`` made."""
    module, name = where.split(":")
    return getattr(importlib.import_module(f"tandem.kernels.{module}"), name)


def launched() -> Iterator[str]:
    """Every kernel that some module launches: by ``kernel[grid]``, or by a ``Launcher``."""
    (root,) = tandem.kernels.__path__
    for path in sorted(Path(root).rglob("*.py")):
        tree = ast.parse(path.read_text())
        package = ".".join(path.relative_to(root).parent.parts)
        kernels = {
            alias.name: f"{package}.{each.module}:{alias.name}"
            for each in ast.walk(tree)
            if isinstance(each, ast.ImportFrom) and each.level
            for alias in each.names
            if (each.module or "").endswith("_kernels")
        }
        for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
            func, args = call.func, call.args
            if isinstance(func, ast.Subscript) and isinstance(func.value, ast.Name):
                found = func.value.id
            elif isinstance(func, ast.Name) and func.id == "Launcher" and args:
                assert isinstance(args[0], ast.Name)
                found = args[0].id
            else:
                continue
            if found in kernels:
                yield kernels[found]


def test_every_kernel_that_is_launched_is_named() -> None:
    """One that is new comes here, with what a step changes of it."""
    assert set(launched()) == set(KERNELS)


@pytest.mark.parametrize("where", KERNELS)
def test_what_changes_with_a_step_is_no_part_of_a_kernel(where: str) -> None:
    params = [each for each in kernel_of(where).params if not each.is_constexpr]
    named = [each.split() for each in KERNELS[where]]
    assert sorted(each.name for each in params) == sorted(name for each in named for name in each)
    assert {each.name for each in params if each.do_not_specialize} == set(named[0])


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Which kernels have been built since the test began, each as often as it was."""
    use_hopper(tmp_path, monkeypatch)
    known = {where: kernel_of(where) for where in KERNELS}

    def names() -> list[str]:
        return [
            where.split(":")[1]
            for where, kernel in known.items()
            for built, *_ in kernel.device_caches.values()
            for _ in built
        ]

    for kernel in known.values():
        kernel.device_caches.clear()
    yield names
    for kernel in known.values():
        kernel.device_caches.clear()


def behind(numbers: Tensor) -> Tensor:
    """The same, 8 bytes behind where an allocation begins."""
    return torch.cat((numbers[:1], numbers))[1:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_of_any_size_run_the_same_kernels(builds: Callable[[], list[str]]) -> None:
    """Each op is built once, whatever the counts are and wherever numbers begin: for Hopper, though
    nothing runs."""
    vocab, counts = 512, (1, 16, 17, 31)
    kv_cache, keys = torch.zeros(40, 4096, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with building_ahead():
        for count in counts:
            ids = torch.arange(count)
            zeros = torch.zeros(count)
            seen = Penalties(ids, ids, zeros, zeros + 1, zeros, zeros)
            penalize(torch.zeros(count, vocab), seen, backend=Backend.TRITON)
            score_tokens(
                torch.zeros(4, vocab), torch.zeros(4).long(), count, backend=Backend.TRITON
            )
            filters = Filters(zeros, ids, zeros)
            thresholds(torch.zeros(count, vocab), filters, temperature=None, backend=Backend.TRITON)
            for numbers in (ids, behind(ids)):
                packed = torch.zeros(count, kv_cache.shape[1], dtype=torch.uint8)
                pack(kv_cache, numbers, packed, backend=Backend.TRITON)
                unpack(packed, numbers, kv_cache, backend=Backend.TRITON)
            data = torch.zeros(count * 8, dtype=torch.uint8)
            add_digest(data, keys[count % 2 :][:1], backend=Backend.TRITON)
        for rows in (1, 2, 15, 16):
            x = torch.zeros(rows, BLOCK, dtype=torch.bfloat16)
            weight = torch.zeros(BLOCK, BLOCK).to(torch.float8_e4m3fn)
            fp8_linear(x, weight, torch.ones(1, 1), None, backend=Backend.TRITON)
            rule = RoutingRule(2, Scoring.SOFTMAX)
            routes = route(torch.zeros(rows, 4), rule, backend=Backend.TRITON)
            silu = ExpertActivation.SILU
            expert_feed_forward(x, EXPERTS, routes, silu, backend=Backend.TRITON)
    assert sorted(builds()) == sorted(
        ["penalize_pairs", "score_rows", "bound_rows", "weigh_rows", "gather_rows", "search_rows"]
        + ["group_stats"] * 2  # with ranks, and with masses alone
        + ["move_rows"] * 2  # there and back
        + ["round_rows"] * 3  # 1, 2 and 16 rows of a program
        + ["add_terms", "multiply_many"]
        + ["route_rows", "place_routes", "multiply_gate_up", "multiply_down", "add_routes"]
    )


@pytest.mark.parametrize("group", [1, 4, 7, 32])
def test_short_chunks_of_any_length_run_kernels_that_a_start_has_built(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if on Hopper, by the kernels' constants: what ``short_batches`` names asks for all that
    steps of any number of chunks do, in the first layer that attends to them and in the next."""
    asked: set[tuple[object, ...]] = set()

    def run(self: JITFunction[Any], *_args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if self.fn.__name__ in ("decode_stream", "decode_shares"):  # plans go by numbers of chunks
            asked.add((self, *named.items()))

    def attend(queries: int, sequences: int) -> None:
        starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
        lengths = torch.full((sequences,), 64, dtype=torch.int32)
        tables = torch.zeros(sequences, 1, dtype=torch.int32)
        batch = PagedBatch(starts, lengths, tables, queries, 64)
        q = torch.zeros(sequences * queries, heads, 64, dtype=torch.bfloat16)
        for _ in range(2):
            prefill(q, kv, batch, Scores(1.0), backend=Backend.GLUON)

    def dependent(on: torch.device) -> dict[str, bool]:
        return {"PDL": True, "launch_pdl": True} if on.type == "cpu" else {"PDL": False}

    for module in (decode_gluon, decode_triton, decode_plan):
        monkeypatch.setattr(module, "dependent", dependent)
    monkeypatch.setattr(decode_triton, "_NOWHERE", torch.device("meta"))
    monkeypatch.setattr(decode_gluon, "generation", lambda _: 9)
    monkeypatch.setattr(JITFunction, "run", run)
    kv_heads = 4
    heads = kv_heads * group
    kv = torch.zeros(1, 2, kv_heads, 64, 64, dtype=torch.bfloat16)
    with Launcher.asking_triton():
        for batch in short_batches(heads, kv_heads):
            attend(*batch)
        built = set(asked)
        assert len(built) > 5
        for queries in range(1, SHORT_ROWS // group + 1):
            for sequences in (1, 3, 9, 60):
                attend(queries, sequences)
    assert asked == built
