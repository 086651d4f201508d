"""What the two machines do with messages and orders that nobody should send."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kvtransfer.machines import (
    D_INC,
    P_INC,
    TOKEN,
    A,
    Face,
    make_key,
    ready,
)

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.messages import (
    Committed,
    Done,
    Final,
    Gone,
    GoneReason,
    Open,
    Part,
    Ready,
    Taken,
    Want,
)
from tandem.protocol.errors import FailCause

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "part",
    [
        Part(A, 1, 0, 8, 0, 210),
        Part(A, 0, 4, 8, 0, 110),
        Part(A, 0, 0, 6, 0, 210),
        Part(A, 0, 0, 12, 0, 310),
        Part(A, 0, 0, 8, 0, 209),
        Part(A, 0, 0, 0, 0, 10),
        Part(A, 0, 0, 20, 0, 510),
    ],
    ids=["index", "gap", "torn block", "too long", "size", "empty", "not announced"],
)
def test_a_part_that_does_not_follow_is_an_identity_fault(part):
    """D checks every PART against what it wants and what READY announced."""
    face = Face()
    face.admit(A, 16)
    face.open(A)
    face.compute(A, 16)
    face.flow()
    face.load(A, 16)
    face.deliver_d(part)
    assert face.d_told[-1].cause is FailCause.IDENTITY
    assert not face.reads


def test_a_ready_that_contradicts_itself_is_an_identity_fault():
    """The length may not change under a key, nor more be announced than there is."""
    for said in (ready(A, 8, 12), ready(A, 20, 16)):
        face = Face()
        face.admit(A, 16)
        face.open(A)
        face.compute(A, 4)
        face.flow()
        face.deliver_d(said)
        assert face.d_told[-1].cause is FailCause.IDENTITY


def test_repeats_and_strangers_are_counted_and_change_nothing():
    """Late, repeated and unknown messages never assert."""
    face = Face()
    face.deliver_p(Taken(A, 3))
    for message in (Committed(A), Gone(A, GoneReason.UNKNOWN)):
        face.deliver_d(message)
    assert len(face.counted) == 3
    assert face.exports.exports == {}
    assert face.imports.pulls == {}


_NAMES = st.sampled_from("abc")
_P_EVENTS = st.one_of(
    st.builds(
        p.Admit,
        st.builds(make_key, _NAMES),
        st.just(D_INC),
        st.just(8),
        st.sampled_from([None, 1000]),
        st.just(True),
    ),
    st.builds(p.Launched, st.builds(make_key, _NAMES), st.just(((0, 1),)), st.sampled_from([4, 8])),
    st.builds(p.Fenced, st.builds(make_key, _NAMES), st.sampled_from([4, 8])),
    st.builds(p.First, st.builds(make_key, _NAMES), st.just(TOKEN), st.just(None)),
    st.builds(p.Finished, st.builds(make_key, _NAMES), st.booleans()),
    st.builds(p.Cancel, st.builds(make_key, _NAMES)),
    st.builds(p.Refuse, st.builds(make_key, _NAMES)),
    st.builds(p.Packed, st.builds(make_key, _NAMES), st.integers(0, 2), st.booleans()),
)
_TO_P = st.one_of(
    st.builds(Open, st.builds(make_key, _NAMES), st.sampled_from([None, 500])),
    st.builds(
        Want,
        st.builds(make_key, _NAMES),
        st.integers(0, 9),
        st.integers(1, 3),
        st.sampled_from([(2,), (2, 2)]),
        st.integers(1, 9),  # of 0 no message is read
    ),
    st.builds(Taken, st.builds(make_key, _NAMES), st.integers(0, 3)),
    st.builds(Done, st.builds(make_key, _NAMES), st.booleans()),
)


@pytest.mark.parametrize("direct", [False, True], ids=["slots", "blocks"])
@settings(max_examples=300, deadline=None)
@given(sequence=st.lists(st.one_of(_P_EVENTS, _TO_P, st.integers(0, 90_000)), max_size=60))
def test_no_sequence_of_events_breaks_the_producer(sequence, direct):
    """Whatever comes in whatever order: slots add up, and each key is released at most as often
    as the engine let go of it."""
    face = Face(send_slots=2, direct=direct)
    for event in sequence:
        if isinstance(event, int):
            face.after(event)
        elif isinstance(event, Open | Want | Taken | Done):
            face.deliver_p(event)
        else:
            face.p(event)
        parts = [out for export in face.exports.exports.values() for out in export.out]
        assert face.exports.ring.free == len(face.exports.ring) - len(parts)
        assert not (direct and parts)
    released = [each.key for each in face.p_told if isinstance(each, events.Released)]
    let_go = [e.key for e in sequence if isinstance(e, p.Finished)]
    assert len(released) <= len(let_go)
    for key in set(released):
        assert released.count(key) <= sum(isinstance(e, p.Admit) and e.key == key for e in sequence)


_D_EVENTS = st.one_of(
    st.builds(
        d.Opened,
        st.builds(make_key, _NAMES),
        st.just(P_INC),
        st.sampled_from([None, 1000]),
        st.just(True),
    ),
    st.builds(
        d.Load,
        st.builds(make_key, _NAMES),
        st.just(((0, 1),)),
        st.sampled_from([0, 4, 8]),
        st.just(8),
    ),
    st.builds(d.Cancel, st.builds(make_key, _NAMES)),
)
_TO_D = st.one_of(
    st.builds(ready, st.builds(make_key, _NAMES), st.sampled_from([0, 4, 8]), st.just(8)),
    st.builds(
        Final, st.builds(make_key, _NAMES), st.just(TOKEN), st.sampled_from([None, None, "stop"])
    ),
    st.builds(
        Part,
        st.builds(make_key, _NAMES),
        st.integers(0, 1),
        st.sampled_from([0, 4]),
        st.sampled_from([4, 8]),
        st.integers(0, 3),
        st.sampled_from([110, 210]),
    ),
    st.builds(Committed, st.builds(make_key, _NAMES)),
    st.builds(Gone, st.builds(make_key, _NAMES), st.sampled_from(GoneReason)),
)


@pytest.mark.parametrize("direct", [False, True], ids=["slots", "blocks"])
@settings(max_examples=300, deadline=None)
@given(
    sequence=st.lists(
        st.one_of(
            _D_EVENTS, _TO_D, st.integers(0, 90_000), st.sampled_from(["read", "lost", "unpack"])
        ),
        max_size=60,
    )
)
def test_no_sequence_of_events_breaks_the_consumer(sequence, direct):
    """Whatever comes in whatever order: each opened key ends at most once, loaded only after
    COMMITTED (or the last copy's tags, or when nothing was wanted), and slots add up."""
    face = Face(receive_slots=2, direct=direct)
    for event in sequence:
        if isinstance(event, int):
            face.after(event)
        elif event in ("read", "lost") and face.reads:
            face.read_done(face.reads.pop(0), FailCause.PEER if event == "lost" else None)
        elif event == "unpack" and face.unpacks:
            unpack = face.unpacks.pop(0)
            face.d(d.Unpacked(unpack.key, unpack.index))
        elif isinstance(event, str):
            continue
        elif isinstance(event, Ready | Final | Part | Committed | Gone):
            if direct and isinstance(event, Ready):
                event = ready(event.key, event.upto, event.num_tokens, direct=True)
            face.deliver_d(event)
        else:
            face.d(event)
        ring = face.imports.ring
        slots = [each.slot for each in face.reads] + [each.slot for each in face.unpacks]
        assert len(ring) - ring.free == sum(slot is not None for slot in slots)
    endings = (events.Loaded, events.LoadFailed, events.Cancelled)
    for name in "abc":
        key = make_key(name)
        opened = sum(isinstance(e, d.Opened) and e.key == key for e in sequence)
        ended = sum(isinstance(e, endings) and e.key == key for e in face.d_told)
        assert ended <= opened
