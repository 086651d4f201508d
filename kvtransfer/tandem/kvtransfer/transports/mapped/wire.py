"""Messages on a worker's Unix socket before its memory, and the card that names the socket.

P sends CHALLENGE. D sends ANSWER and an end of a pair of sockets; P sends PROOF there with an end
of its own pair, and on that SIZES and the descriptors. The proofs cover the pairs, so that nothing
between the ends can use them. The secret comes over the authenticated control link, never over this
socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.files import close_all
from tandem.protocol.ids import Incarnation

NONCE_BYTES = 32
PROOF_BYTES = 32
MAPPING = b"tandem kv: mapped memory, 2"
"""Purpose of the keys by which workers greet each other."""
COPYING = b"tandem kv: copies by the agent, 2"
"""Purpose of the keys by which consumers request a producer's blocks from the agent."""


def fresh() -> bytes:
    """Return random bytes."""
    return os.urandom(NONCE_BYTES)


def key_for(secret: bytes, purpose: bytes) -> bytes:
    """Return the key of one purpose, which reveals neither the secret nor other keys."""
    return hmac.digest(secret, purpose, "sha256")


def proof_of(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Return the proof of an end in this role over parts of any length, in order."""
    lengths = (len(part).to_bytes(4, "little") + part for part in (role, *parts))
    return hmac.digest(key, b"".join(lengths), "sha256")


def is_proof(found: bytes, expected: bytes) -> bool:
    """Return whether both are equal, in constant time."""
    return hmac.compare_digest(found, expected)


VERSION = 2
"""Version of the greeting; workers of another version use another transport."""
MAGIC = b"TDMFDS02"
CHALLENGE = struct.Struct("<8s32s")
"""Magic, P's random bytes."""
ANSWER = struct.Struct("<8s16s32s32s")
"""Magic, D's incarnation, D's random bytes, D's proof."""
PROOF = struct.Struct("<8s32s")
"""Magic, P's proof."""
SIZES = struct.Struct("<8sQQQ")
"""Magic, then bytes of the ranges: KV cache, slots, tags."""
SECRET_BYTES = 32
MAX_PATH = 76
"""Bytes of the folder's path: with the socket's name the kernel takes 107."""


class Given(NamedTuple):
    """Descriptors of P's memory and the bytes of each."""

    descriptors: tuple[int, int, int]
    sizes: tuple[int, int, int]

    def close(self) -> None:
        """Close the descriptors; mappings stay."""
        close_all(self.descriptors)


class Greeting(NamedTuple):
    """Values that both proofs of one greeting cover."""

    name: bytes
    """Name of P's socket in its folder."""
    producer: bytes
    consumer: bytes
    """Incarnations."""
    challenge: bytes
    answer: bytes
    """Random bytes of P and of D."""

    def consumers(self, key: bytes, pair: bytes) -> bytes:
        """Return D's proof; ``pair`` names the socket that D sends."""
        return proof_of(key, b"consumer", *self, pair)

    def producers(self, key: bytes, pair: bytes, own: bytes) -> bytes:
        """Return P's proof; ``own`` names the socket that P sends."""
        return proof_of(key, b"producer", *self, pair, own)


class MappedCard(msgspec.Struct, frozen=True, array_like=True):
    """Address of P's descriptors. Earlier releases begin with the name, so neither accepts the
    other's card."""

    version: Annotated[int, Meta(ge=1)]
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[0-9a-f]+\.sock\Z")]
    """Name of the socket, in the folder that both ends know."""
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    place: Annotated[bytes, Meta(max_length=16)] = b""
    """Identity of the folder; empty if it is unknown."""


_cards = msgspec.msgpack.Decoder(
    MappedCard
)  # made once, as threads must not make it at the same time


def encode_card(card: MappedCard) -> bytes:
    """Encode a card for WELCOME."""
    return msgspec.msgpack.encode(card)


def decode_card(data: bytes) -> MappedCard:
    """Decode a card of WELCOME. Raises TransportError, which names the versions if they differ."""
    check_version(data, VERSION, "the greeting of mapped memory")
    try:
        return _cards.decode(data)
    except msgspec.MsgspecError as error:
        raise TransportError(f"not a card of mapped memory: {error}") from error


def check_version(card: bytes, allowed: int, what: str) -> None:
    """Raise TransportError for a card of another version; one without a leading number is of
    version 1."""
    try:
        first = msgspec.msgpack.decode(card, type=list[Any])[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
        return  # not a card: its decoder reports why
    version = first if isinstance(first, int) else 1
    if version != allowed:
        raise TransportError(f"the producer has version {version} of {what}, allowed: {allowed}")


def place_of(folder: Path) -> bytes:
    """Return the 16 bytes that name a folder of this machine, regardless of its mount. Raises
    TransportError."""
    try:
        found = folder.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError as error:
        raise TransportError(f"{folder} cannot be identified: {error}") from error
    named = b"%s/%d/%d" % (boot, found.st_dev, found.st_ino)
    return hashlib.blake2b(named, digest_size=16).digest()


def socket_name(incarnation: Incarnation) -> str:
    """Return the name of the socket at which a worker sends its descriptors."""
    return f"{hashlib.blake2b(incarnation, digest_size=12).hexdigest()}.sock"


def open_folder(given: str | None) -> Path:
    """Return the folder of the sockets; by default a private folder of the user below the temporary
    files. Raises TransportError."""
    if given is not None:
        folder = Path(given)
        if folder.is_symlink() or not folder.is_dir():
            raise TransportError(f"kv_node_folder: {given} is not a folder")
    else:
        folder = Path(tempfile.gettempdir()) / f"tandem-kv-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise TransportError(f"no folder for sockets: {error}") from error
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
            raise TransportError(f"other users can access {folder}: set --kv-node-folder")
    if len(os.fsencode(folder)) > MAX_PATH:
        raise TransportError(f"kv_node_folder: {folder} is too long, allowed: {MAX_PATH} bytes")
    return folder
