"""Frames survive the wire, and nothing else gets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.link.sockets import decode_to_router, decode_to_worker
from tandem.protocol import messages
from tandem.protocol.errors import FailCause, Refusal, RefusalCode, WireError
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey, new_incarnation
from tandem.protocol.outputs import (
    Accepted,
    BlockEvents,
    EngineCoreOutput,
    Failed,
    FinishReason,
    Refused,
    TokenLogprobs,
)
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams

INCARNATIONS = st.binary(min_size=16, max_size=16).map(Incarnation)
KEYS = st.builds(RequestKey, INCARNATIONS, st.text(max_size=20), st.integers(0, 9))
REQUESTS = st.builds(
    EngineCoreRequest,
    key=KEYS,
    prompt_token_ids=st.lists(st.integers(0, 200_000), max_size=20),
    params=st.builds(
        SamplingParams,
        seed=st.integers(-(2**63), 2**63 - 1),
        temperature=st.floats(0, 2),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    ),
    emitted=st.lists(st.lists(st.integers(0, 99), max_size=3).map(tuple), max_size=3).map(tuple),
    block_hashes=st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=3).map(
        tuple
    ),
    budget_ms=st.none() | st.integers(0, 10**7),
    kv=st.none() | st.builds(Produce, INCARNATIONS) | st.builds(Consume, INCARNATIONS),
)


@given(REQUESTS)
def test_a_request_arrives_as_it_was_sent(request: EngineCoreRequest) -> None:
    sent = messages.Submit(request)

    assert decode_to_worker(messages.encode(sent)) == sent


def test_a_frame_arrives_as_it_was_sent() -> None:
    """Outputs with logprobs, refusals, failures and block events share one frame."""
    logprobs = TokenLogprobs(5, -0.25, 1, (5, 6), (-0.25, -1.5))
    output = EngineCoreOutput("r", 1, 0, 3, (5,), FinishReason.STOP, 5, (logprobs,), (None,), 16)
    frame = messages.Frame(
        step=9,
        outputs=(output,),
        accepted=(Accepted("a", 0),),
        refused=(Refused("b", 0, Refusal(code=RefusalCode.CAPACITY, message="full")),),
        failed=(Failed("c", 2, FailCause.DIGEST, "part 3"),),
        blocks=BlockEvents(stored=(BlockHash(bytes(16)),), cleared=True),
    )

    assert decode_to_router(messages.encode(frame)) == frame


def test_one_token_is_a_small_frame() -> None:
    """The hot path's frame stays under 100 bytes per output."""
    one = EngineCoreOutput("0123456789abcdef", 0, 0, 100, (40_000,))
    frame = messages.encode(messages.Frame(step=10**6, outputs=(one,)))

    assert len(frame) < 100


@given(st.binary(max_size=200))
def test_random_bytes_are_wire_errors(data: bytes) -> None:
    """Garbage raises the one error that receivers count, whatever it holds."""
    for decode in (decode_to_worker, decode_to_router):
        try:
            decode(data)
        except WireError:
            continue
        raise AssertionError("garbage was taken for a frame")


@given(REQUESTS, st.integers(0, 400))
def test_a_truncated_frame_is_a_wire_error(request: EngineCoreRequest, cut: int) -> None:
    """A frame cut anywhere never decodes to another request."""
    data = messages.encode(messages.Submit(request))

    with pytest.raises(WireError):
        decode_to_worker(data[: min(cut, len(data) - 1)])


def test_an_oversized_frame_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is checked before the content."""
    monkeypatch.setattr(decode_to_worker, "max_bytes", 8)

    with pytest.raises(WireError, match="at most 8"):
        decode_to_worker(messages.encode(messages.Hello(1)) * 2)


def test_a_key_prints_short() -> None:
    """Logs name request, attempt and router."""
    key = RequestKey(new_incarnation(), "abc", 2)

    assert str(key).startswith("abc/2@")
