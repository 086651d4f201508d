"""Vectors as bytes: their shape, and the magnitude of each value seen without making numbers."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.embeds import MAX_MAGNITUDE, PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.messages import Submit, encode
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams


def number(bits: int, dtype: str) -> float:
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    wide = bits << 16 if dtype == "bfloat16" else bits
    return float(struct.unpack("<f", struct.pack("<I", wide))[0])


def passes(values: bytes, dtype: str) -> bool:
    try:
        PromptEmbeds(dtype, 1, values).verify_values("prompt_embeds")
    except InvalidParameter:
        return False
    return True


def test_a_wrong_value_is_refused_in_words() -> None:
    with pytest.raises(InvalidParameter, match=r"prompt_embeds: .*\[1, 1\] float16.* under 32768"):
        PromptEmbeds("float16", 1, b"\xff\xff").verify_values("prompt_embeds")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_of_16_bits(dtype: str) -> None:
    """Those that are right, all together; each of the others alone among zeros."""
    right = bytearray()
    for bits in range(1 << 16):
        value = number(bits, dtype)
        if math.isfinite(value) and abs(value) < MAX_MAGNITUDE:
            right += struct.pack("<H", bits)
        else:
            assert not passes(struct.pack("<3H", 0, bits, 0), dtype)
    assert passes(bytes(right), dtype)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 16_383, 16_384, 40_000]),
    st.sampled_from([1, 16_384, 16_385, 50_000]),
)
def test_a_value_of_32_bits_anywhere(bits: int, at: int, count: int) -> None:
    """Among values that are right, at the edges of the pieces that are looked at."""
    at = min(at, count - 1)
    values = bytearray(struct.pack("<I", 0xC6FFFFFF) * count)  # the largest below zero
    struct.pack_into("<I", values, 4 * at, bits)
    value = number(bits, "float32")
    right = math.isfinite(value) and abs(value) < MAX_MAGNITUDE
    assert passes(bytes(values), "float32") is right


def test_rows_and_cuts() -> None:
    embeds = PromptEmbeds("float16", 3, bytes(range(30)))
    assert (embeds.num_tokens, embeds.row_bytes) == (5, 6)
    assert bytes(embeds.rows(1, 3)) == bytes(range(6, 18))
    assert embeds.cut(3, 5).values == bytes(range(18, 30))
    assert embeds.cut(0, 5) is embeds
    assert repr(embeds) == "PromptEmbeds([5, 3] float16)"


@pytest.mark.parametrize(
    "embeds",
    [
        PromptEmbeds("float64", 4, bytes(32)),
        PromptEmbeds("float32", 3, bytes(32)),
        PromptEmbeds("float32", 4, bytes(33)),
        PromptEmbeds("float32", 4, b""),
        PromptEmbeds("float32", 0, b""),
    ],
)
def test_shapes_that_no_model_takes(embeds: PromptEmbeds) -> None:
    with pytest.raises(InvalidParameter, match="prompt_embeds: "):
        embeds.verify_shape("prompt_embeds", 4)


def test_vectors_are_bytes_in_a_frame() -> None:
    values = bytes(1 << 20)
    request = EngineCoreRequest(
        key=None,  # type: ignore[arg-type]
        prompt_token_ids=[0] * 64,
        params=SamplingParams(),
        prompt_embeds=PromptEmbeds("float32", 4096, values),
    )
    assert len(values) < len(encode(Submit(request))) < len(values) + 1024
