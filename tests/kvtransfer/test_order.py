"""Who is served first where slots are short: the oldest hand-off, so that under load some end."""

from __future__ import annotations

from tests.kvtransfer.machines import BLOCK, A, Face, make_key

from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.messages import Open, Taken, Want
from tandem.kvtransfer.handoff.timers import Age

B, C = make_key("b"), make_key("c")


def pump(face: Face) -> None:
    """Deliver and pack all that waits; reads stay."""
    while face.to_p or face.to_d or face.packs:
        if face.to_p:
            face.deliver_p(face.to_p.pop(0))
        elif face.to_d:
            face.deliver_d(face.to_d.pop(0))
        else:
            pack = face.packs.pop(0)
            face.p(p.Packed(pack.key, pack.index, ok=True))


def test_send_slots_go_to_the_oldest_export_until_it_wants_no_more():
    """Three prompts wait for two slots: the first has all its parts packed before the second's."""
    face = Face(send_slots=2, per_peer=2)
    for key in (A, B, C):
        face.admit(key, 32)
    for key in (C, B, A):  # whoever asks first
        face.deliver_p(Open(key, None))
        face.deliver_p(Want(key, 0, 2, (8,), BLOCK))
    for key in (A, B, C):
        face.compute(key, 32)
    packed = []
    while face.packs:
        pack = face.packs.pop(0)
        packed.append((pack.key, pack.index))
        face.p(p.Packed(pack.key, pack.index, ok=True))
        face.deliver_p(Taken(pack.key, pack.index))
    assert packed == [(key, index) for key in (A, B, C) for index in range(4)]


def test_receive_slots_go_to_the_oldest_pull():
    """A slot that comes free is the older hand-off's, until that one has no part that waits."""
    face = Face(receive_slots=1, per_peer=4)
    for key in (A, B):
        face.admit(key, 32)
        face.open(key)
    pump(face)
    for key in (A, B):
        face.compute(key, 32)
    pump(face)
    for key in (B, A):  # the younger asks first, and has the slot when the older's parts come
        face.load(key, 32)
        pump(face)
    read = []
    while face.reads:
        read.append((face.reads[0].key, face.reads[0].index))
        face.read_done(face.reads.pop(0))
        unpack = face.unpacks.pop(0)
        face.d(d.Unpacked(unpack.key, unpack.index))
        pump(face)
    assert read == [(B, 0), *((A, index) for index in range(4)), *((B, n) for n in range(1, 4))]


def test_a_key_that_comes_again_is_the_youngest():
    """An age is kept while the key is known, and no longer."""
    age = Age()
    for key in (A, B, A):
        age.note(key)
    assert age.order([B, A]) == [A, B]
    other = age.copy()
    age.forget(A)
    age.note(A)
    assert age.order([B, A]) == [B, A]
    assert other.order([B, A]) == [A, B]
