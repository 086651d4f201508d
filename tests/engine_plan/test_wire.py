"""What an engine and a rank elsewhere say to each other: whole after bytes, and never for ever."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from tests.engine_plan.builders import config_of, params_of

from tandem.engine.executor.channel import MOST_BYTES, Channel, ChannelClosed
from tandem.engine.executor.wire import (
    Failed,
    RankError,
    Start,
    Started,
    StepResult,
    decode_from_rank,
    decode_plan,
    decode_start,
    encode,
    error_of,
    failed,
)
from tandem.engine.kv_memory import Capacity
from tandem.engine.step import (
    BlockLoad,
    BlockTransfers,
    DraftSampled,
    FenceDone,
    ModelRunnerOutput,
    NewSequence,
    Sampled,
    SchedulerOutput,
    SeqId,
    SpecTokens,
    StepRow,
    TransferReport,
)
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import TokenLogprobs

PLAN = SchedulerOutput(
    7,
    rows=(StepRow(SeqId(3), 5, 1, ((9,), ()), (0,)), StepRow(SeqId(4), 0, 40)),
    new=(
        NewSequence(
            SeqId(4),
            list(range(40)),
            38,
            params_of(logit_bias={3: 1.5}, stop_token_ids=(1, 2), n=2, logprobs=3),
            1,
            (7,),
            ([1, 2, 3], [4, -1]),
            has_ids=False,
        ),
    ),
    dropped=(SeqId(1),),
    block_copies=((1, 2),),
    awaits_masks=True,
    transfers=BlockTransfers(stores=((5, 0),), loads=(BlockLoad(1, ((0, 6), (1, 7))),)),
    drafts=(SpecTokens(SeqId(3), 2), SpecTokens(SeqId(4), 1, (39,))),
)
SCORE = TokenLogprobs(5, -0.25, 1, (5, 6), (-0.25, -2.0))


class Unfinished:
    def done(self) -> bool:
        return False


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel, in one process."""
    here, there = (Channel(each) for each in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_a_plan_comes_out_as_it_went_in():
    """Every field of every row, sequence and transfer; its empty form, too."""
    assert decode_plan(encode(PLAN)) == PLAN
    empty = SchedulerOutput(1, ())
    assert decode_plan(encode(empty)) == empty


def test_a_result_comes_with_a_fence_that_is_done():
    """A fence does not cross: a result is sent when its writes have landed, and only then."""
    sampled = (Sampled(SeqId(3), (0,), ((8,),), ((SCORE,),)),)
    report = TransferReport((1,), ((2, "why"),))
    drafted = (DraftSampled(Sampled(SeqId(3), (0,), ((8, 9),), ((SCORE, SCORE),)), 2, 1, (5,)),)
    output = ModelRunnerOutput(
        7,
        sampled,
        FenceDone(),
        {SeqId(4): (SCORE,)},
        report,
        drafted=drafted,
        num_proposed={SeqId(3): 2},
    )
    message = decode_from_rank(encode(StepResult.of(output)))
    assert isinstance(message, StepResult)
    back = message.output()
    assert back.fence.done()
    for name in ("step", "sampled", "prompt_logprobs", "transfers", "drafted", "num_proposed"):
        assert getattr(back, name) == getattr(output, name)
    with pytest.raises(AssertionError, match="landed"):
        StepResult.of(ModelRunnerOutput(7, (), Unfinished()))


def test_start_and_its_answer_come_across():
    """The whole config with the model's facts; what the rank holds."""
    config = config_of(max_num_seqs=3, kv_offloading_size=0.5)
    start = decode_start(encode(Start(config, 20, 1, "store")))
    assert start.config == config
    started = Started(Capacity(5, config.layout, 2), 4096)
    assert decode_from_rank(encode(started)) == started


def test_errors_come_across_by_what_they_are():
    """A wrong setting as such, with the value as it was shown; others by the rank's name."""
    wrong = InvalidParameter("block_size", [24], "one of 16, 32")
    message = decode_from_rank(encode(failed(wrong)))
    assert isinstance(message, Failed)
    told = error_of(message, 0)
    assert isinstance(told, InvalidParameter)
    assert (str(told), told.param) == (str(wrong), "block_size")
    other = error_of(failed(KeyError("x")), 3)
    assert isinstance(other, RankError)
    assert str(other) == "rank 3: KeyError: 'x'"


def test_frames_of_other_types_are_no_plans():
    """A result is no plan: what a rank reads is checked, not trusted."""
    with pytest.raises(msgspec.ValidationError):
        decode_plan(encode(Failed("a", "b")))


def test_frames_come_whole_and_in_order(ends):
    """Empty ones, several parts, and descriptors between them."""
    here, there = ends
    here.send(b"one", seconds=5)
    here.send(b"", seconds=5)
    here.send(b"tw", b"o", seconds=5)
    assert [there.receive(seconds=5) for _ in range(3)] == [b"one", b"", b"two"]
    read, write = os.pipe()
    here.send(b"pipe", seconds=5)
    here.send_descriptor(write)
    here.send(b"after", seconds=5)
    assert there.receive(seconds=5) == b"pipe"
    got = there.receive_descriptor(seconds=5)
    assert there.receive(seconds=5) == b"after"
    os.write(got, b"x")
    assert os.read(read, 1) == b"x"
    for each in (read, write, got):
        os.close(each)


def test_an_end_that_is_gone_is_seen(ends):
    """By who receives, by who sends, and in the middle of a frame."""
    here, there = ends
    there._socket.send(b"\x08\0\0\0\0\0\0\0half")
    there.close()
    with pytest.raises(ChannelClosed):
        here.receive(seconds=None)
    with pytest.raises(ChannelClosed):
        here.send(b"x", seconds=5)


def test_no_wait_is_for_ever(ends):
    """Nobody answers, nobody takes what is sent or gives a descriptor: the deadline ends it."""
    here, _ = ends
    with pytest.raises(TimeoutError):
        here.receive(seconds=0.01)
    with pytest.raises(TimeoutError):
        here.send(b"x" * (8 << 20), seconds=0.05)
    with pytest.raises(TimeoutError):
        here.receive_descriptor(seconds=0.01)


def test_a_frame_that_comes_late_is_taken_by_the_next_call(ends):
    """Wherever the deadline cut it: in its length, or in its content."""
    here, there = ends
    frame = (5).to_bytes(8, "little") + b"hello"
    for cut in (3, 8, 10):
        here._socket.send(frame[:cut])
        with pytest.raises(TimeoutError):
            there.receive(seconds=0.01)
        here._socket.send(frame[cut:])
        assert there.receive(seconds=5) == b"hello"


def test_a_frame_that_claims_too_much_is_none(ends):
    """No memory is taken for it."""
    here, there = ends
    here._socket.send((MOST_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(ChannelClosed, match="none of this channel's"):
        there.receive(seconds=5)
