"""KV held as codes at one end or both: what arrives is what D would have stored itself."""

import logging

import pytest
import torch
from tests.kvtransfer.builders import Consumer, Producer, fingerprint_of, make_config
from tests.kvtransfer.unequal import Pair, kv_of, layout_of

from tandem.kernels.narrow.codes import to_codes
from tandem.protocol.card import FP8_CODES

TOKENS = 44
BLOCKS = {4: list(range(5, 16)), 16: list(range(5, 8))}
SCALES = [0.02 * 1.3**row for row in range(8)]
"""Of layer, K or V, and head. The first ones are so small that numbers saturate."""


def scales() -> torch.Tensor:
    return torch.tensor(SCALES).view(2, 2, 2, 1, 1)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """[layer, K|V, head, token, head_dim], some beyond the largest code."""
    kv = kv_of("a", TOKENS, layout_of(4)) * 3
    kv[:, :, :, ::7] *= 16
    return kv.to(dtype)


def codes_of(kv: torch.Tensor) -> torch.Tensor:
    return to_codes(kv, scales()).view(torch.float8_e4m3fn)


def wanted(kv: torch.Tensor, dtypes: tuple[str, str]) -> torch.Tensor:
    """What P holds of these numbers, as D's type has it by D's rule."""
    held = codes_of(kv) if dtypes[0] == FP8_CODES else kv
    if dtypes[0] == dtypes[1]:
        return held
    if dtypes[1] == FP8_CODES:
        return codes_of(held)
    return (held.float() * scales()).to(kv.dtype)


def hand_over(pair: Pair, kv: torch.Tensor, hit: int = 0) -> torch.Tensor:
    theirs, mine = (BLOCKS[size] for size in pair.sizes)
    held = codes_of(kv) if pair.layouts[0].groups[0].dtype == FP8_CODES else kv
    pair.hand_over("a", TOKENS, theirs, mine, hit, kv=held)
    return pair.found(mine, TOKENS)


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    one, other = found.view(torch.uint8), want.view(torch.uint8)
    return found.dtype == want.dtype and torch.equal(one, other)


PAIRS = [
    ("bfloat16", FP8_CODES),
    ("float32", FP8_CODES),
    (FP8_CODES, "bfloat16"),
    (FP8_CODES, "float32"),
    (FP8_CODES, FP8_CODES),
]


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 4)])
def test_what_arrives_is_what_the_consumer_would_store(workers, sizes, dtypes):
    """Codes saturate and are nearest; a code is read as its scale times it, rounded once."""
    kv = numbers(getattr(torch, next((each for each in dtypes if each != FP8_CODES), "float32")))
    pair = Pair(workers, make_config(), sizes, dtypes, kv_scales=[SCALES])
    assert same(hand_over(pair, kv), wanted(kv, dtypes))
    held = pair.layouts[1 if dtypes[1] == FP8_CODES else 0].groups[0].token_bytes
    loaded = {"role": "consumer", "outcome": "loaded"}
    pair.consumer.until(lambda: pair.consumer.metric("tandem:kv_handoffs_total", **loaded))
    moved = pair.consumer.metric("tandem:kv_handoff_bytes_total", role="consumer")
    assert moved < 1.6 * TOKENS * held  # a byte for each number, headers and ends of blocks


@pytest.mark.parametrize("connector", ["shm", "memory_blocks"])
def test_codes_are_copied_from_blocks_to_blocks(workers, connector):
    pair = Pair(workers, make_config(kv_connector=connector), (4, 16), (FP8_CODES, FP8_CODES))
    kv = numbers(torch.float32)
    assert same(hand_over(pair, kv, hit=16)[:, :, :, 16:], codes_of(kv)[:, :, :, 16:])


@pytest.mark.parametrize("dtypes", [("bfloat16", FP8_CODES), (FP8_CODES, "bfloat16")])
def test_unlike_types_go_through_slots_and_the_log_says_why(workers, folder, caplog, dtypes):
    """Copies from blocks to blocks cannot convert."""
    caplog.set_level(logging.INFO)
    config = make_config(kv_connector="auto", kv_node_folder=str(folder))
    pair = Pair(workers, config, (4, 4), dtypes, kv_scales=[SCALES])
    (health,) = pair.consumer.service.peer_health()
    assert health.transport == "nixl"
    words = f"not by shm: KV is held as {dtypes[0]} there and {dtypes[1]} here"
    assert words in caplog.text
    kv = numbers(torch.bfloat16)
    assert same(hand_over(pair, kv), wanted(kv, dtypes))


@pytest.mark.parametrize("asks", [0, 1])
def test_the_models_scales_are_used_if_the_other_end_asks_for_fp8_on_the_wire(workers, asks):
    """Numbers are rounded once, not by a scale of each block and then again."""
    dtypes = ("bfloat16", FP8_CODES) if asks == 0 else (FP8_CODES, "bfloat16")
    configs = [make_config(), make_config()]
    configs[asks] = make_config(kv_wire_dtype="fp8")
    pair = Pair(workers, configs[0], (4, 4), dtypes, consumer_config=configs[1], kv_scales=[SCALES])
    kv = numbers(torch.bfloat16)
    assert same(hand_over(pair, kv), wanted(kv, dtypes))


def test_types_that_do_not_convert_are_refused_by_name(workers):
    """A fault of the settings that a fingerprint would show, were it not of the other type."""
    producer = workers(Producer, layout=layout_of(4, "bfloat16"))
    layout = layout_of(4, "float32")
    consumer = workers(
        Consumer, layout=layout, fingerprint=fingerprint_of(layout_of(4, "bfloat16"))
    )
    consumer.service.set_peers([producer.service.control])
    words = "the peer holds KV as bfloat16; here it is float32"
    consumer.until(lambda: consumer.service.why_down(producer.incarnation) == words)
