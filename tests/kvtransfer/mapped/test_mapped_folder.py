"""Where mapping workers meet: sockets, the folder they lie in, cards, and names of transports."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import torch
from tests.kvtransfer.descriptors import of_memory
from tests.kvtransfer.mapped import hand
from tests.kvtransfer.mapped.test_mapped import block, ended, until
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES, Worker

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import NoSocketYet, TransportError
from tandem.kvtransfer.memory.blocks import Blocks, SharedTags
from tandem.kvtransfer.service.parts import make_transports
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped import giving
from tandem.kvtransfer.transports.mapped.wire import (
    Given,
    decode_card,
    encode_card,
    open_folder,
)
from tandem.protocol.ids import new_incarnation


def test_a_worker_of_another_machine_has_no_socket_here(consumer: Worker) -> None:
    """Said at once, when the link is made."""
    card = hand.encoded("ab.sock")
    with pytest.raises(TransportError, match=r"ab\.sock"):
        consumer.transport.connect(new_incarnation(), "127.0.0.1", card)


@pytest.mark.parametrize("name", ["../a.sock", "/a.sock", "a", "", "a.sock/", "x" * 65 + ".sock"])
def test_a_card_names_a_socket_and_no_other_file(name: str) -> None:
    with pytest.raises(TransportError, match="not a card"):
        decode_card(hand.encoded(name))


def test_sockets_of_killed_workers_are_swept(producer: Worker, folder: Path) -> None:
    """A socket at which nobody listens goes when the next worker begins; others stay."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / "dead.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(str(folder / "live.sock"))
        live.listen(1)
        card = decode_card(producer.transport.serve(producer.slots, producer.blocks))
        assert not (folder / "dead.sock").exists()
        assert (folder / "live.sock").exists()
    assert (folder / card.name).stat().st_mode & 0o077 == 0
    producer.transport.stop()
    assert not (folder / card.name).exists()


def test_a_worker_that_cannot_be_met_keeps_no_descriptors(
    producer: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "long").mkdir()
    monkeypatch.setattr(producer.transport, "_folder", folder / ("long/" * 30))
    before = of_memory()
    producer.transport.serve(producer.slots, producer.blocks)
    assert "no socket" in (producer.transport.unmet or "")
    producer.transport.stop()
    assert of_memory() <= before


def test_a_worker_can_be_met_as_soon_as_the_folder_lets_it(
    consumer: Worker, producer: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the card that it gave before. One who finds no socket in this very folder is told so."""
    monkeypatch.setattr(giving, "socket_name", lambda _: "dead.sock")
    (folder / "dead.new").mkdir()
    card = producer.transport.serve(producer.slots, producer.blocks)
    with pytest.raises(NoSocketYet, match=r"dead\.sock"):
        consumer.transport.connect(producer.incarnation, "127.0.0.1", card)
    (folder / "dead.new").rmdir()
    until(lambda: producer.transport.unmet is None)
    consumer.transport.connect(producer.incarnation, "127.0.0.1", card)
    read = consumer.transport.read(producer.incarnation, [block(0, 0)])
    assert ended(consumer.transport, read) is Progress.DONE


def test_a_socket_of_another_user_is_waited_for_by_nobody(
    consumer: Worker, producer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there and stays theirs: a link by another way was taken down again and again for it."""

    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            raise PermissionError("not yours")

    monkeypatch.setattr(socket, "socket", Forbidden)
    card = producer.transport.serve(producer.slots, producer.blocks)
    with pytest.raises(TransportError, match="not yours") as caught:
        consumer.transport.connect(producer.incarnation, "127.0.0.1", card)
    assert not isinstance(caught.value, NoSocketYet)


def test_a_socket_that_was_taken_away_comes_back(
    producer: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody cleaned the folder up; what another has put there since is left alone at the end."""
    monkeypatch.setattr(giving, "LOOK_SECONDS", 0.02)
    card = decode_card(producer.transport.serve(producer.slots, producer.blocks))
    place = folder / card.name
    first = place.lstat().st_ino
    place.rename(folder / "kept")  # so that its inode is nobody else's
    until(lambda: place.exists())
    assert place.lstat().st_ino != first
    monkeypatch.setattr(giving, "LOOK_SECONDS", 60.0)
    server = producer.transport._server
    assert server is not None
    until(lambda: server._due > time.monotonic() + 30)
    place.unlink()
    place.touch()
    producer.transport.stop()
    assert place.exists()


class Before(msgspec.Struct, frozen=True, array_like=True):
    """The card of the release before the greeting had a version."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]+\.sock\Z")]
    secret: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    incarnation: bytes
    place: bytes = b""


def test_a_producer_of_another_release_is_refused_by_its_card(
    consumer: Worker, folder: Path
) -> None:
    """The link goes another way at once, and the reason names both versions; nobody is called."""
    old = msgspec.msgpack.encode(Before("ab.sock", b"s" * 16, b"i" * 16))
    newer = encode_card(msgspec.structs.replace(hand.card_of("ab.sock"), version=3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
        there.bind(str(folder / "ab.sock"))
        there.listen(1)
        there.setblocking(False)
        for card, version in ((old, 1), (newer, 3)):
            with pytest.raises(TransportError, match=f"version {version} .* allowed: 2") as caught:
                consumer.transport.connect(new_incarnation(), "127.0.0.1", card)
            assert not isinstance(caught.value, NoSocketYet)
        with pytest.raises(BlockingIOError):
            there.accept()


def test_an_older_release_does_not_take_a_card_of_this_one(producer: Worker) -> None:
    """It would send the secret in clear."""
    card = producer.transport.serve(producer.slots, producer.blocks)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(card, type=Before)
    assert decode_card(card).version == 2


def test_a_folder_that_cannot_be_looked_through_ends_no_worker(
    producer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left to ask others by, as a rule: dead sockets stay."""

    def broken(_: Path) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(giving, "_sweep", broken)
    producer.transport.serve(producer.slots, producer.blocks)
    assert producer.transport.unmet is None


def test_a_dead_socket_that_may_not_be_removed_ends_no_worker(
    producer: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def forbidden(_: Path, **__: object) -> None:
        raise PermissionError("not yours")

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / "dead.sock"))
    monkeypatch.setattr(Path, "unlink", forbidden)
    producer.transport.serve(producer.slots, producer.blocks)
    assert producer.transport.unmet is None
    producer.transport.stop()


def test_a_worker_that_begins_leaves_the_socket_of_one_that_begins_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for sockets of killed workers at any moment of the other's beginning."""
    moments = []

    def while_beginning(name: str) -> None:
        does = getattr(socket.socket, name)

        def sweeps(sock: socket.socket, *args: object) -> None:
            giving._sweep(folder)
            does(sock, *args)
            giving._sweep(folder)
            moments.append(name)

        monkeypatch.setattr(socket.socket, name, sweeps)

    while_beginning("bind")
    while_beginning("listen")
    with open(os.devnull, "rb") as nothing:
        a, b, c = (os.dup(nothing.fileno()) for _ in range(3))
    given = Given((a, b, c), (1, 2, 3))
    served = giving.DescriptorServer(given, new_incarnation(), folder, on_garbage=lambda: None)
    served.start()
    try:
        assert moments == ["bind", "listen"]
        assert [path.name for path in folder.iterdir()] == [served.path.name]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(str(served.path))
    finally:
        served.stop()
    assert not list(folder.iterdir())


def test_the_folder_is_ours_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nobody else may enter it; one that anybody may is refused."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    own = open_folder(None)
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    with pytest.raises(TransportError, match="--kv-node-folder"):
        open_folder(None)
    with pytest.raises(TransportError, match="kv_node_folder"):
        open_folder(str(folder / "nothing"))
    (folder / "link").symlink_to(own)
    with pytest.raises(TransportError, match=r"kv_node_folder: .*/link is not a folder"):
        open_folder(str(folder / "link"))
    long = folder / ("x" * 80)
    long.mkdir()
    with pytest.raises(TransportError, match="too long"):
        open_folder(str(long))


def test_a_name_is_for_memory_that_it_reaches() -> None:
    """cuda_p2p is of GPUs and shm of the host's memory; the other one is named."""
    for name, on_gpu in (("cuda_p2p", False), ("shm", True)):
        with pytest.raises(TransportError, match=r"try (shm|cuda_p2p)"):
            make_transports(
                KVTransferConfig(kv_connector=name), new_incarnation(), "producer", on_gpu=on_gpu
            )


def test_memory_of_the_engines_own_is_not_shared(producer: Worker) -> None:
    """A slab that no other process can map is said so, and nothing is given."""
    own = Blocks(torch.zeros(BLOCKS, BYTES, dtype=torch.uint8), SharedTags(BLOCKS))
    with pytest.raises(TransportError, match="not shared"):
        producer.transport.serve(producer.slots, own)
