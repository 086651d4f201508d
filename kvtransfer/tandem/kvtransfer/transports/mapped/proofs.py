"""Proofs that both ends of a connection have one secret; the secret itself is never sent.

A proof is a MAC over the role of its sender, over fresh bytes of both ends, and over the sockets
that the answer takes. So it serves once, in one direction and on these sockets. A process that
passes messages on between two ends has other sockets, and gets an answer from neither.
"""

from __future__ import annotations

import hmac
import os

NONCE_BYTES = 32
PROOF_BYTES = 32
MAPPING = b"tandem kv: mapped memory, 2"
"""Purpose of the keys by which workers greet each other."""
COPYING = b"tandem kv: copies by the agent, 2"
"""Purpose of the keys by which consumers ask the agent for a producer's blocks."""


def fresh() -> bytes:
    """Return bytes that have never been sent."""
    return os.urandom(NONCE_BYTES)


def key_for(secret: bytes, purpose: bytes) -> bytes:
    """Return the key of one purpose: it reveals neither the secret nor another purpose's key."""
    return hmac.digest(secret, purpose, "sha256")


def proof_of(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Return the proof of an end in this role, over parts of any length, in their order."""
    lengths = (len(part).to_bytes(4, "little") + part for part in (role, *parts))
    return hmac.digest(key, b"".join(lengths), "sha256")


def is_proof(found: bytes, expected: bytes) -> bool:
    """Return whether both are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(found, expected)
