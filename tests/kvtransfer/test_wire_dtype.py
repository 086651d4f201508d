"""KV that travels as fp8: its bytes, its error, who decides, and where it is refused."""

import logging

import pytest
import torch
from tests.kvtransfer.builders import Consumer, Producer, make_config
from tests.kvtransfer.unequal import Pair, kv_of, layout_of

from tandem.kvtransfer.config import CONNECTORS
from tandem.protocol.errors import InvalidParameter

TOKENS = 44
SIZES = {(4, 4): (11, 11), (4, 16): (11, 3), (16, 4): (3, 11)}


def pair_of(workers, sizes, dtype, producer: str, consumer: str, connector: str = "tcp") -> Pair:
    """Linked; each end has its own setting."""
    return Pair(
        workers,
        make_config(kv_connector=connector, kv_wire_dtype=producer),
        sizes,
        dtype,
        consumer_config=make_config(kv_connector=connector, kv_wire_dtype=consumer),
    )


def received(pair: Pair) -> float:
    """Bytes that D has read, once its one hand-off is counted."""
    loaded = {"role": "consumer", "outcome": "loaded"}
    pair.consumer.until(lambda: pair.consumer.metric("tandem:kv_handoffs_total", **loaded))
    return float(pair.consumer.metric("tandem:kv_handoff_bytes_total", role="consumer"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_numbers_keep_three_bits_and_half_the_bytes_of_bfloat16_travel(workers, sizes, dtype):
    """Each within a sixteenth of itself, or of the least that its row can hold."""
    pair = pair_of(workers, sizes, dtype, "auto", "fp8")
    theirs, mine = (list(range(5, 5 + count)) for count in SIZES[sizes])
    pair.hand_over("a", TOKENS, theirs, mine)
    found = pair.found(mine, TOKENS).float()
    wanted = kv_of("a", TOKENS, pair.layouts[0]).float()
    close = (found - wanted).abs() <= wanted.abs() / 16 + wanted.abs().amax() * 2**-17
    assert bool(close.all())
    assert not torch.equal(found, wanted)

    plain = pair_of(workers, sizes, dtype, "auto", "auto")
    plain.hand_over("a", TOKENS, theirs, mine)
    share = received(pair) / received(plain)
    assert share < (0.6 if dtype == "bfloat16" else 0.32)


@pytest.mark.parametrize(("producer", "consumer"), [("fp8", "auto"), ("auto", "fp8")])
def test_either_end_decides(workers, producer, consumer):
    """P says it in WELCOME, D in each WANT."""
    pair = pair_of(workers, (4, 4), "bfloat16", producer, consumer)
    pair.hand_over("a", TOKENS, list(range(11)), list(range(11)))
    raw = TOKENS * pair.layouts[0].groups[0].token_bytes
    assert received(pair) < 0.75 * raw


def test_zeros_and_large_numbers_come_through(workers):
    """A row of zeros has no scale to divide by; the largest number of a row is exact."""
    pair = pair_of(workers, (4, 4), "bfloat16", "fp8", "fp8")
    kv = torch.zeros((2, 2, 2, 4, 16), dtype=torch.bfloat16)
    kv[0, 0, 0, 1, 3], kv[1, 1, 1, 0, 0] = 3e38, -1e-30
    pair.hand_over("a", 4, [1], [2], kv=kv)
    assert torch.equal(pair.found([2], 4), kv)


def test_auto_leaves_out_what_maps_memory(workers, folder, caplog):
    """Both ends meet in a folder, and one of them asks for fp8: KV goes through slots."""
    caplog.set_level(logging.INFO)
    near = {"kv_connector": "auto", "kv_node_folder": str(folder)}
    pair = Pair(
        workers,
        make_config(**near, kv_wire_dtype="fp8"),
        (4, 4),
        consumer_config=make_config(**near),
    )
    (health,) = pair.consumer.service.peer_health()
    assert health.transport == "nixl"
    assert "not by mapped memory: kv_wire_dtype is fp8" in caplog.text


@pytest.mark.parametrize("connector", sorted({*CONNECTORS} - {"auto", "nixl", "tcp"}))
def test_a_connector_without_slots_is_refused_with_it(connector):
    with pytest.raises(InvalidParameter, match="kv_wire_dtype"):
        make_config(kv_connector=connector, kv_wire_dtype="fp8")
    make_config(kv_connector=connector)


def test_another_word_is_refused():
    """Only what is there can be asked for."""
    with pytest.raises(InvalidParameter, match="one of auto, fp8"):
        make_config(kv_wire_dtype="int8")


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_kv_that_is_held_in_a_byte_is_not_narrowed(workers, kind):
    """There would be nothing to win."""
    layout = layout_of(4, "float8_e4m3fn")
    with pytest.raises(InvalidParameter, match="kv_wire_dtype"):
        workers(kind, make_config(kv_wire_dtype="fp8"), layout=layout)
