"""Key folders as a pod mounts them, for tests of links with CURVE."""

from __future__ import annotations

from pathlib import Path

import zmq

from tandem.protocol.keys import KeyRing
from tandem.protocol.names import CURVE_PUBLIC_FILE, CURVE_SECRET_FILE


def write_keys(folder: Path, **generations: int) -> dict[str, KeyRing]:
    """A new pair for each ``role=generation``, added to one folder of peers; rings by role."""
    peers = folder / "peers"
    peers.mkdir(exist_ok=True)
    rings = {}
    for role, generation in generations.items():
        own = folder / f"{role}-{generation}"
        own.mkdir()
        public, secret = zmq.curve_keypair()
        (own / CURVE_PUBLIC_FILE).write_bytes(public)
        (own / CURVE_SECRET_FILE).write_bytes(secret)
        (peers / f"{role}.{generation}.public").write_bytes(public + b"\n")
        ring = KeyRing.load(str(own), str(peers))
        assert ring is not None
        rings[role] = ring
    return rings
