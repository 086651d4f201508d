"""Both machines where P's blocks are copied into D's: what holds of copies, tags and blocks."""

import pytest
from tests.kvtransfer.machines import (
    BLOCK,
    COMMIT_MS,
    LEASE_MS,
    P_INC,
    TOKEN,
    A,
    Face,
    named,
    ready,
)

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.actions import QuarantinePeer, Tag, Untag
from tandem.kvtransfer.handoff.messages import (
    Committed,
    Done,
    Final,
    Gone,
    GoneReason,
    Part,
    Ready,
    Taken,
    Want,
)
from tandem.kvtransfer.handoff.tables import DState
from tandem.protocol.errors import FailCause


@pytest.fixture
def copying() -> Face:
    """A hand-off of 16 tokens of which two parts are being copied."""
    face = Face(direct=True)
    face.admit(A, 16)
    face.open(A)
    face.compute(A, 16)
    face.end(A)
    while face.to_p or face.to_d:
        face.deliver_p(face.to_p.pop(0)) if face.to_p else face.deliver_d(face.to_d.pop(0))
        if face.imports.pulls[A].state is DState.WAITING and face.d_told:
            face.load(A, 16)
    assert len(face.reads) == 2
    return face


def test_parts_take_no_slot_and_name_blocks_of_both_ends(copying):
    """D's own table says where a copy lands, P's where it lies."""
    assert [read.slot for read in copying.reads] == [None, None]
    assert [read.remote_blocks for read in copying.reads] == [(0, 1), (2, 3)]
    assert [read.block_ids for read in copying.reads] == [(100, 101), (102, 103)]
    for ring in (copying.exports.ring, copying.imports.ring):
        assert ring.free == len(ring)


@pytest.mark.parametrize("fault", [None, FailCause.PEER])
def test_blocks_are_free_only_when_the_last_copy_is_terminal(copying, fault):
    """Whatever ended the hand-off, and however the copies end."""
    copying.d(d.Cancel(A))
    assert copying.d_told[-1] == events.Cancelled(A, blocks_free=False)
    copying.read_done(copying.reads.pop(0))
    assert copying.imports.pulls[A].state is DState.FAILING
    copying.read_done(copying.reads.pop(0), fault)
    assert copying.d_told[-1] == events.Released(A)
    assert copying.imports.pulls[A].state is DState.CLOSED
    assert not copying.unpacks


def test_a_copy_that_fails_waits_for_the_others(copying):
    """One fault ends it; the blocks stay until nothing is on its way to them."""
    copying.read_done(copying.reads.pop(0), FailCause.PEER)
    failed = copying.d_told[-1]
    assert (failed.cause, failed.blocks_free) == (FailCause.PEER, False)
    copying.read_done(copying.reads.pop(0))
    assert copying.d_told[-1] == events.Released(A)


def test_a_wrong_tag_fails_the_hand_off(copying):
    copying.read_done(copying.reads.pop(0))
    check = copying.unpacks.pop(0)
    assert (check.slot, check.block_ids) == (None, (100, 101))
    copying.to_p.clear()
    copying.d(d.Unpacked(A, check.index, FailCause.IDENTITY, "another's tag"))
    assert copying.to_p == [Done(A, ok=False)]
    copying.deliver_p(copying.to_p.pop())
    copying.deliver_d(copying.to_d.pop())
    assert copying.d_told[-1].cause is FailCause.IDENTITY
    assert not copying.d_told[-1].blocks_free
    assert copying.blamed == [QuarantinePeer(P_INC, "another's tag")]


DOUBTED = {
    "a lease that had ended": (lambda face: face.deliver_d(Gone(A, GoneReason.CANCELLED)), "gone"),
    "a lost link": (Face.break_link, "peer"),
    "no answer": (lambda face: face.after(COMMIT_MS), "timeout"),
    "a cancel": (lambda face: face.d(d.Cancel(A)), None),
}


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("how", DOUBTED)
def test_the_tag_of_another_is_told_when_p_has_answered_and_once(copying, how, copies):
    """A lease that ended while D copied, whose blocks are the next request's, is nobody's fault."""
    copying.read_done(copying.reads.pop(0))
    if not copies:
        copying.read_done(copying.reads.pop(0))
        copying.d(d.Unpacked(A, copying.unpacks.pop().index))
    told = len(copying.d_told)
    copying.d(d.Unpacked(A, copying.unpacks.pop().index, FailCause.IDENTITY, "another's tag"))
    assert len(copying.d_told) == told
    act, cause = DOUBTED[how]
    act(copying)
    (ending,) = copying.d_told[told:]
    assert getattr(ending, "cause", None) == cause
    assert ending.blocks_free is not bool(copies)
    for message in (Gone(A, GoneReason.ABANDONED), Gone(A, GoneReason.CANCELLED)):
        copying.deliver_d(message)
    if copies:
        assert copying.imports.pulls[A].state is DState.FAILING
        copying.read_done(copying.reads.pop())
        assert copying.d_told[told + 1 :] == [events.Released(A)]
    assert copying.imports.pulls[A].state is DState.CLOSED
    assert not copying.blamed


def test_blocks_wait_for_the_answer_though_the_last_copy_has_ended(copying):
    """Its ending says that they are free, not a word before it."""
    copying.read_done(copying.reads.pop(0))
    copying.d(d.Unpacked(A, copying.unpacks.pop().index, FailCause.IDENTITY, "another's tag"))
    told = len(copying.d_told)
    copying.read_done(copying.reads.pop())
    assert len(copying.d_told) == told
    copying.deliver_d(Gone(A, GoneReason.EXPIRED))
    (ending,) = copying.d_told[told:]
    assert ending == events.LoadFailed(
        A, FailCause.GONE, "the prefill worker let go: expired", blocks_free=True
    )


def test_tags_are_set_before_ready_and_cleared_before_the_blocks_are_free():
    """Block by block, as they are written for good; the last partial one with the prompt's end."""
    face = Face(direct=True)
    face.admit(A, 10)
    face.open(A)
    face.flow()
    face.compute(A, 6)
    assert face.tags == [Tag(A, 0, 0, (0,))]
    face.compute(A, 10)
    assert face.tags[1:] == [Tag(A, 0, 1, (1, 2))]
    face.end(A)
    face.after(LEASE_MS)
    assert face.tags[2:] == [Untag(A)]
    assert face.p_told == [events.Released(A)]


def test_p_reuses_its_blocks_though_a_copy_of_them_goes_on(copying):
    """A late copy harms D alone, which does not use it: the lease ends when it ends."""
    copying.p(p.Cancel(A))
    assert copying.p_told == [events.Released(A)]
    copying.deliver_d(copying.to_d.pop(0))
    assert copying.d_told[-1].cause is FailCause.GONE
    assert not copying.d_told[-1].blocks_free


def test_a_part_of_a_slot_is_an_identity_fault_where_blocks_are_copied():
    """The link's transport says which kind comes; P cannot choose by itself."""
    face = Face(direct=True)
    face.admit(A, 8)
    face.open(A)
    face.compute(A, 8)
    face.flow()
    face.load(A, 8)
    face.deliver_d(Part(A, 0, 0, 8, 0, 210))
    assert face.d_told[-1].cause is FailCause.IDENTITY
    assert "PART" in face.d_told[-1].message


@pytest.mark.parametrize("direct", [False, True], ids=["slots", "blocks"])
@pytest.mark.parametrize("blocks", [(), ((0,),), ((0, 1, 2),), ((0, 1), (2,))])
def test_ready_names_the_blocks_that_are_to_be_copied_and_no_others(blocks, direct):
    """Else D would copy too little, or what nobody promised; and none where parts go by slots."""
    face = Face(direct=direct)
    face.admit(A, 8)
    face.open(A)
    right = ready(A, 8, 8, direct=direct)
    said = Ready(A, 8, 8, right.items, blocks)
    face.deliver_d(said)
    failed = face.d_told[-1]
    if said == right:
        assert failed == events.Ready(A, 8)
        return
    assert failed.cause is FailCause.IDENTITY
    assert "READY names" in failed.message
    assert not face.reads


def test_a_want_ends_an_export_whose_blocks_are_copied():
    """There is nothing to pack: who asks for it does not keep to the protocol."""
    face = Face(direct=True)
    face.admit(A, 8)
    face.open(A)
    face.flow()
    face.compute(A, 8)
    face.deliver_p(Want(A, 0, 2, (2,), BLOCK))
    assert face.to_d[-1] == Gone(A, GoneReason.PROTOCOL)


def test_done_before_the_prompt_is_no_commit():
    """P commits what it has named in full, nothing else."""
    face = Face(direct=True)
    face.admit(A, 16)
    face.open(A)
    face.flow()
    face.compute(A, 8)
    face.deliver_p(Done(A, ok=True))
    assert face.to_d[-1] == Gone(A, GoneReason.PROTOCOL)


def test_copies_begin_without_asking_and_end_without_waiting():
    """What READY names is copied as soon as there are blocks for it, what follows at once; behind
    the last tag the KV is D's, and DONE goes out beside it."""
    face = Face(direct=True)
    face.admit(A, 16)
    face.open(A)
    face.flow()
    face.p(p.Begun(A))
    assert face.to_d == [ready(A, 0, 16, direct=True)]
    face.flow()
    face.load(A, 16)
    assert not face.to_p
    assert not face.reads
    face.compute(A, 8)
    face.deliver_d(face.to_d.pop(0))
    assert [read.remote_blocks for read in face.reads] == [(0, 1)]
    face.compute(A, 16)
    face.end(A)
    face.deliver_d(face.to_d.pop(0))
    assert [read.remote_blocks for read in face.reads] == [(0, 1), (2, 3)]
    assert face.to_d == [Final(A, TOKEN)]
    face.deliver_d(face.to_d.pop())
    for read in list(face.reads):
        face.read_done(read)
    assert face.d_told == [events.Ready(A, 16)]
    for unpack in list(face.unpacks):
        face.d(d.Unpacked(A, unpack.index))
    assert face.d_told[1:] == [events.Loaded(A, TOKEN)]
    assert face.to_p == [Done(A, ok=True)]
    assert not any(isinstance(each, Taken | Want) for each in face.to_p)
    face.deliver_p(face.to_p.pop())
    assert face.to_d == [Committed(A)]
    face.deliver_d(face.to_d.pop())
    assert face.counted == []
    assert face.p_told == [events.Released(A)]


def test_local_hits_are_not_copied():
    """Copies begin behind what D has, inside what P names."""
    face = Face(direct=True)
    face.open(A)
    face.deliver_d(ready(A, 16, 16, direct=True))
    face.load(A, 16, hit=4)
    assert [read.remote_blocks for read in face.reads] == [(1, 2), (3,)]
    assert [read.block_ids for read in face.reads] == [(101, 102), (103,)]


def test_a_late_ready_of_less_changes_nothing():
    """READY is cumulative, and one that was said before may come again."""
    face = Face(direct=True)
    face.open(A)
    face.deliver_d(ready(A, 16, 16, direct=True))
    face.deliver_d(ready(A, 8, 16, direct=True))
    assert face.imports.pulls[A].remote == named(16, 16)


def test_ready_says_the_manifest():
    face = Face()
    face.admit(A, 8)
    face.compute(A, 4)
    face.open(A)
    face.deliver_p(face.to_p.pop(0))
    (said,) = face.to_d
    assert isinstance(said, Ready)
    assert [(each.group, each.start, each.stop) for each in said.items] == [(0, 0, 8)]
