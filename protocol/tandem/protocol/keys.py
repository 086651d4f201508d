"""CURVE keys as files: a role's own pair, and the public keys of all roles, which may change.

During rotation a role may have several generations: callers try the newest first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import CURVE_PUBLIC_FILE, CURVE_SECRET_FILE

logger = logging.getLogger(__name__)

KEY_LENGTH = 40
"""Characters of a key in Z85."""
_SUFFIX = ".public"
_NEVER = -1.0


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Keys of a client's socket, in Z85."""

    server: bytes
    public: bytes
    secret: bytes


class KeyRing:
    """This role's pair and the public keys of all roles. Thread-safe."""

    def __init__(self, public: bytes, secret: bytes, peers: Path) -> None:
        self.public = public
        self.secret = secret
        self._peers = peers
        self._known: tuple[float, dict[str, tuple[bytes, ...]]] = (_NEVER, {})
        self._unread = ""
        """Error of the last read; empty if it succeeded."""

    @classmethod
    def load(cls, keys: str | None, peers: str | None) -> KeyRing | None:
        """Return a ring of the two folders; None if neither is given.

        Raises InvalidParameter for a folder or file without a valid key.
        """
        if keys is None and peers is None:
            return None
        if keys is None or peers is None:
            name = "curve_keys" if keys is None else "curve_peers"
            raise InvalidParameter(name, None, "a folder: both settings are needed")
        if not Path(peers).is_dir():
            raise InvalidParameter("curve_peers", peers, "a folder of ROLE.GENERATION.public files")
        public = _read_key("curve_keys", Path(keys) / CURVE_PUBLIC_FILE)
        secret = _read_key("curve_keys", Path(keys) / CURVE_SECRET_FILE)
        return cls(public, secret, Path(peers))

    def public_keys(self, role: str) -> tuple[bytes, ...]:
        """Return the keys of a role, newest generation first; read again if the folder has changed.

        Raises InvalidParameter if no read has succeeded yet.
        """
        changed = self._changed()
        if changed != self._known[0]:
            try:
                self._known = (changed, self._read_peers())
            except InvalidParameter as error:
                if self._known[0] == _NEVER:
                    raise
                if self._unread != str(error):
                    logger.error("known keys stay, since others cannot be read: %s", error)
                self._unread = str(error)
            else:
                self._unread = ""
        return self._known[1].get(role, ())

    def names(self) -> list[str]:
        """Return ``ROLE.GENERATION`` of every public key."""
        return sorted(path.name.removesuffix(_SUFFIX) for path in self._peers.glob(f"*{_SUFFIX}"))

    def call(self, roles: tuple[str, ...], attempt: int) -> CallKeys | None:
        """Return the keys to connect to one of the roles; None if there are none.

        Attempts cycle through the known keys.
        """
        keys = [key for role in roles for key in self.public_keys(role)]
        if not keys:
            return None
        return CallKeys(keys[attempt % len(keys)], self.public, self.secret)

    def knows(self, role: str, key: bytes) -> bool:
        return key in self.public_keys(role)

    def _changed(self) -> float:
        try:
            return self._peers.stat().st_mtime
        except OSError:
            return self._known[0]  # unreadable while it is replaced

    def _read_peers(self) -> dict[str, tuple[bytes, ...]]:
        found: dict[str, list[tuple[int, bytes]]] = {}
        for path in self._peers.glob(f"*{_SUFFIX}"):
            role, _, generation = path.name.removesuffix(_SUFFIX).rpartition(".")
            if role and generation.isdecimal():
                key = _read_key("curve_peers", path)
                found.setdefault(role, []).append((int(generation), key))
        return {
            role: tuple(key for _, key in sorted(keys, reverse=True))
            for role, keys in found.items()
        }


def _read_key(param: str, path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise InvalidParameter(param, str(path), f"a file with a key ({error.strerror})") from error
    if len(key) != KEY_LENGTH:
        raise InvalidParameter(param, str(path), f"{KEY_LENGTH} characters of Z85")
    return key
