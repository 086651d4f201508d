"""Both machines where parts go by slots: what a wrong slot says, and against whom."""

import pytest
from tests.kvtransfer.machines import P_INC, A, Face

from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.actions import QuarantinePeer
from tandem.protocol.errors import FailCause


@pytest.mark.parametrize("fault", [FailCause.IDENTITY, FailCause.DIGEST])
@pytest.mark.parametrize("stood", [True, False], ids=["the lease stood", "the link is lost"])
def test_a_wrong_slot_is_blamed_on_the_link_only_if_p_says_that_its_lease_stood(fault, stood):
    """P frees the slots of a consumer that it counts as lost: what lies there is the next one's.
    Slots that are still being read are withheld meanwhile."""
    face = Face(direct=False)
    face.admit(A, 16)
    face.open(A)
    face.compute(A, 16)
    face.end(A)
    while len(face.reads) < 2:
        if face.to_p:
            face.deliver_p(face.to_p.pop(0))
        elif face.to_d:
            face.deliver_d(face.to_d.pop(0))
        elif face.packs:
            pack = face.packs.pop(0)
            face.p(p.Packed(pack.key, pack.index, ok=True))
        else:
            face.load(A, 16)
    face.read_done(face.reads.pop(0))
    told = len(face.d_told)
    face.d(d.Unpacked(A, face.unpacks.pop().index, fault, "another's"))
    assert len(face.d_told) == told
    assert face.imports.ring.quarantined == 1
    if stood:
        while face.to_p:
            face.deliver_p(face.to_p.pop(0))
        face.deliver_d(face.to_d.pop())
    else:
        face.break_link()
    (ending,) = face.d_told[told:]
    assert (ending.cause, ending.blocks_free) == (fault if stood else FailCause.PEER, True)
    assert face.blamed == ([QuarantinePeer(P_INC, "another's")] if stood else [])
    face.read_done(face.reads.pop())
    assert face.is_free()
