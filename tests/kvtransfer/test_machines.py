"""Both machines over virtual time: the straight way, and the ways out of it."""

import pytest
from tests.kvtransfer.machines import (
    BLOCK,
    COMMIT_MS,
    D_INC,
    EXPECT_MS,
    LEASE_MS,
    P_INC,
    TOKEN,
    TOMBSTONE_MS,
    TRANSFER_MS,
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
    Gone,
    GoneReason,
    Open,
    Want,
)
from tandem.kvtransfer.handoff.tables import DState, PState
from tandem.protocol.errors import FailCause


@pytest.fixture(autouse=True, params=[False, True], ids=["slots", "blocks"])
def kind(request, monkeypatch):
    """Parts go by slots, or P's blocks are copied into D's."""
    monkeypatch.setattr(Face, "direct", request.param)
    return "blocks" if request.param else "slots"


def test_a_hand_off_in_chunks_ends_loaded_and_released_once():
    """Whole blocks go as they are ready, the last partial one with the end of the prompt."""
    face = Face()
    face.admit(A, 18)
    face.open(A)
    face.flow()
    face.compute(A, 7)
    face.flow()
    face.load(A, 18)
    face.flow()
    assert face.imports.pulls[A].reached == (4,)
    face.compute(A, 18)
    face.flow()
    assert face.imports.pulls[A].reached == (18,)
    assert not any(isinstance(each, events.Loaded) for each in face.d_told)
    face.end(A)
    face.flow()
    assert face.d_told == [events.Ready(A, 18), events.Loaded(A, TOKEN)]
    assert face.p_told == [events.Released(A)]
    assert face.is_free()
    assert face.counted == []


def test_parts_never_exceed_the_credits_and_slots():
    """With two credits two parts are out, however much is ready. (Copies have neither.)"""
    face = Face(direct=False)
    face.admit(A, 64)
    face.compute(A, 64)
    face.deliver_p(Open(A, None))
    face.deliver_p(Want(A, 0, 2, (8,), BLOCK))
    assert [part.index for part in face.packs] == [0, 1]
    assert all(part.stop - part.start == 8 for part in face.packs)


def test_a_part_is_no_larger_than_the_consumers_slots():
    """The consumer says how many blocks it can take at once."""
    face = Face(direct=False)
    face.admit(A, 16)
    face.compute(A, 16)
    face.deliver_p(Open(A, None))
    face.deliver_p(Want(A, 0, 2, (1,), BLOCK))
    assert [(part.start, part.stop) for part in face.packs] == [(0, 4), (4, 8)]


def test_an_open_before_the_request_waits_for_it():
    """The consumer may be faster than the router's other leg."""
    face = Face()
    face.open(A)
    face.flow()
    assert face.exports.exports[A].state is PState.EXPECTED
    face.admit(A, 4)
    face.compute(A, 4)
    face.flow()
    assert face.d_told == [events.Ready(A, 4)]


def test_an_open_for_a_request_that_never_comes_is_answered_in_time():
    """No consumer waits for a producer that was never asked."""
    face = Face()
    face.open(A)
    face.flow()
    face.after(EXPECT_MS)
    face.flow()
    assert isinstance(face.d_told[-1], events.LoadFailed)
    assert face.d_told[-1].cause is FailCause.GONE


def test_expected_keys_are_bounded():
    """OPENs for requests that are not there cannot fill P's memory."""
    face = Face()
    face.exports._max_expected = 2
    for name in "abc":
        face.deliver_p(Open(make_key(name), None))
    assert face.to_d == [Gone(make_key("c"), GoneReason.UNKNOWN)]
    assert len(face.exports.exports) == 2


def test_tombstones_are_bounded_and_forgotten():
    face = Face()
    face.exports._max_tombstones = 2
    for name in "abc":
        face.p(p.Cancel(make_key(name)))
    assert [key.request for key in face.exports.exports] == ["b", "c"]
    face.after(TOMBSTONE_MS)
    assert face.exports.exports == {}
    assert face.exports.next_deadline() is None


def test_a_done_too_early_or_for_too_little_is_no_commit():
    """P commits what it has sent in full, nothing else."""
    for wanted in (False, True):
        face = Face(direct=False)
        face.admit(A, 16)
        face.compute(A, 16)
        face.deliver_p(Open(A, None))
        if wanted:
            face.deliver_p(Want(A, 0, 1, (1,), BLOCK))
        face.end(A)
        face.to_d.clear()
        face.deliver_p(Done(A, ok=True))
        assert face.to_d == [Gone(A, GoneReason.PROTOCOL)]


def test_a_second_want_or_one_out_of_range_ends_the_export():
    """A consumer that contradicts itself gets nothing."""
    for want in (Want(A, 3, 1, (1,), BLOCK), Want(A, 20, 1, (1,), BLOCK), Want(A, 0, 1, (1,), 3)):
        face = Face()
        face.admit(A, 16)
        face.deliver_p(Open(A, None))
        face.deliver_p(want)
        assert face.to_d == [Gone(A, GoneReason.PROTOCOL)]


def test_another_consumer_gets_nothing():
    """A key is answered to the consumer that the router named, and to nobody else."""
    face = Face()
    face.admit(A, 4)
    face.compute(A, 4)
    stranger = p.ConsumerMessage(A, P_INC, Open(A, None))
    face.p(stranger)
    assert face.to_d == [Gone(A, GoneReason.UNKNOWN)]
    assert face.counted == ["p:wrong consumer"]
    assert not face.exports.exports[A].opened


def test_another_producer_is_not_believed():
    """COMMITTED from somebody else is counted."""
    face = Face()
    face.open(A)
    face.d(d.PeerMessage(A, D_INC, ready(A, 4, 4, direct=Face.direct)))
    assert face.counted == ["d:wrong producer"]


def test_a_budget_that_is_spent_fails_both_ends():
    """No hand-off outlives its request's deadline."""
    face = Face()
    face.admit(A, 8, budget_ms=1000)
    face.open(A, budget_ms=1000)
    face.flow()
    face.after(1000)
    face.flow()
    assert face.d_told[-1].cause is FailCause.TIMEOUT
    assert isinstance(face.p_told[0], events.LoadFailed)
    face.p(p.Finished(A, cancelled=True))
    assert face.p_told[-1] == events.Released(A)
    assert face.is_free()


def test_waiting_for_computation_is_no_stall_but_a_read_that_hangs_is(kind):
    """Only what is due makes D's clock run."""
    face = Face()
    face.admit(A, 16)
    face.open(A)
    face.compute(A, 4)
    face.flow()
    face.load(A, 16)
    face.flow()
    face.after(10 * TRANSFER_MS)
    assert face.imports.pulls[A].state is DState.PULLING
    face.compute(A, 8)
    while not face.reads:
        if face.packs:
            face.p(p.Packed(A, face.packs.pop(0).index, ok=True))
        face.deliver_d(face.to_d.pop(0))
    face.after(TRANSFER_MS)
    assert face.d_told[-1].cause is FailCause.TIMEOUT
    assert face.d_told[-1].blocks_free is (kind == "slots")
    assert face.imports.ring.quarantined == (kind == "slots")


def test_no_answer_to_done_fails_the_load():
    """Commit is never assumed. (Copies need none: their tags say it.)"""
    face = Face(direct=False)
    face.admit(A, 4)
    face.open(A)
    face.flow()
    face.compute(A, 4)
    face.flow()
    face.load(A, 4)
    face.flow()
    face.end(A)
    face.deliver_d(face.to_d.pop(0))
    assert face.imports.pulls[A].state is DState.COMMITTING
    face.to_p.clear()
    face.after(COMMIT_MS)
    assert face.d_told[-1].cause is FailCause.TIMEOUT
    late = face.d_told.copy()
    face.deliver_d(Committed(A))
    assert face.d_told == late


def test_a_failed_read_frees_its_slot_and_fails_the_load():
    face = Face(direct=False)
    face.admit(A, 4)
    face.open(A)
    face.compute(A, 4)
    face.flow()
    face.load(A, 4)
    face.deliver_p(face.to_p.pop(0))
    face.p(p.Packed(A, 0, ok=True))
    face.deliver_d(face.to_d.pop(0))
    face.read_done(face.reads.pop(), FailCause.PEER)
    assert face.d_told[-1].cause is FailCause.PEER
    assert face.imports.ring.free == len(face.imports.ring)
    face.flow()
    assert face.exports.ring.free == len(face.exports.ring)


def test_a_pack_that_fails_ends_the_export():
    """P's own fault is told, not hidden. (Nothing is packed where blocks are read.)"""
    face = Face(direct=False)
    face.admit(A, 4)
    face.open(A)
    face.compute(A, 4)
    face.flow()
    face.load(A, 4)
    face.deliver_p(face.to_p.pop(0))
    face.p(p.Packed(A, face.packs.pop().index, ok=False))
    face.flow()
    assert face.d_told[-1].cause is FailCause.GONE
    assert face.exports.ring.free == len(face.exports.ring)


def test_a_load_that_does_not_fit_is_the_engines_fault():
    """Too few blocks, or another end than READY said."""
    for blocks, start, stop in (((1,), 0, 8), ((1, 2), 0, 7), ((1, 2), 2, 8)):
        face = Face()
        face.admit(A, 8)
        face.open(A)
        face.compute(A, 8)
        face.flow()
        face.d(d.Load(A, (blocks,), start, stop))
        assert face.d_told[-1].cause is FailCause.INTERNAL


def test_a_link_that_breaks_ends_everything_on_it():
    """Both ends learn it by themselves; nothing is said."""
    face = Face()
    for name in "ab":
        key = make_key(name)
        face.admit(key, 8)
        face.open(key)
        face.flow()
        face.compute(key, 8)
        face.flow()
        face.load(key, 8)
    face.break_link()
    assert [each.cause for each in face.d_told[2:]] == [FailCause.PEER] * 2
    assert not face.to_p
    assert not face.to_d
    for name in "ab":
        face.end(make_key(name))
    assert [type(each) for each in face.p_told[2:]] == [events.Released] * 2
    for pack in face.packs:
        face.p(p.Packed(pack.key, pack.index, ok=True))
    for read in face.reads:  # of copies, which end by themselves
        face.read_done(read)
    assert face.is_free()


def test_the_lease_has_a_hard_cap():
    """A consumer that never comes costs blocks for a while only; a later DONE gets no commit."""
    face = Face()
    face.admit(A, 8)
    face.compute(A, 8)
    face.end(A)
    assert face.p_told == []
    face.after(LEASE_MS)
    assert face.p_told == [events.Released(A)]
    face.deliver_p(Done(A, ok=True))
    assert face.to_d == [Gone(A, GoneReason.EXPIRED)]
