"""What crosses the Unix socket: a greeting, and the sizes of what the descriptors beside them are.

The greeting carries P's incarnation and a secret that P gave to D over the authenticated control
link; the answer is one message with the descriptors of slab, slots and tags.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import TransportError
from tandem.protocol.ids import Incarnation

MAGIC = b"TDMFDS01"
GREETING = struct.Struct("<8s16s16s")
"""Magic, P's incarnation, P's secret."""
SIZES = struct.Struct("<8sQQQ")
"""Magic, then bytes of the ranges: slab, slots, tags."""
SECRET_BYTES = 16
MAX_PATH = 76
"""Bytes of the folder's path: with the socket's name the kernel takes 107."""


class Given(NamedTuple):
    """Descriptors of P's memory and the bytes of each."""

    descriptors: tuple[int, int, int]
    sizes: tuple[int, int, int]

    def close(self) -> None:
        """Close the descriptors; what is mapped stays."""
        for each in self.descriptors:
            os.close(each)


class MappedCard(msgspec.Struct, frozen=True, array_like=True):
    """How to get P's descriptors."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[0-9a-f]+\.sock\Z")]
    """Of the socket, in the folder that both ends know."""
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    place: Annotated[bytes, Meta(max_length=16)] = b""
    """Of the folder; nothing where it cannot be told, or from a worker that does not say it yet."""


_cards = msgspec.msgpack.Decoder(MappedCard)  # built once: threads must not do it side by side


def encode_card(card: MappedCard) -> bytes:
    """For WELCOME."""
    return msgspec.msgpack.encode(card)


def decode_card(data: bytes) -> MappedCard:
    """From WELCOME, or TransportError."""
    try:
        return _cards.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not a card of mapped memory: {error}") from error


def place_of(folder: Path) -> bytes:
    """16 bytes that name a folder of this machine, however it is mounted. Raises TransportError."""
    try:
        found = folder.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError as error:
        raise TransportError(f"{folder} cannot be told from others: {error}") from error
    named = b"%s/%d/%d" % (boot, found.st_dev, found.st_ino)
    return hashlib.blake2b(named, digest_size=16).digest()


def socket_name(incarnation: Incarnation) -> str:
    """Of the socket at which a worker gives its descriptors."""
    return f"{hashlib.blake2b(incarnation, digest_size=12).hexdigest()}.sock"


def open_folder(given: str | None) -> Path:
    """The folder of the sockets; without one a user's own below the temporary files, which nobody
    else may enter. Raises TransportError."""
    if given is not None:
        folder = Path(given)
        if not folder.is_dir():
            raise TransportError(f"kv_node_folder: {given} is no folder")
    else:
        folder = Path(tempfile.gettempdir()) / f"tandem-kv-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise TransportError(f"no folder for sockets: {error}") from error
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or not folder.is_dir():
            raise TransportError(f"{folder} is not this user's alone: give --kv-node-folder")
    if len(os.fsencode(folder)) > MAX_PATH:
        raise TransportError(f"kv_node_folder: {folder} is too long, allowed: {MAX_PATH} bytes")
    return folder
