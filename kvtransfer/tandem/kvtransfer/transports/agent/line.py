"""A worker's connection to the agent of its node; nothing here blocks."""

from __future__ import annotations

import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.kvtransfer.errors import NoAgentYet, TransportError
from tandem.kvtransfer.transports.agent.wire import (
    MAX_MESSAGE,
    SOCKET_NAME,
    VERSION,
    Hello,
    ToAgent,
    ToWorker,
    encode,
    to_worker,
)
from tandem.kvtransfer.transports.mapped.files import user_of

_BESIDE = "-agent"


def agent_folder(folder: Path) -> Path:
    """Return the agent's folder for workers that meet in ``folder``: its name with ``-agent`` if
    only root can have put it there, as in pods, else the same."""
    beside = folder.with_name(folder.name + _BESIDE)
    try:
        above, found = folder.parent.stat(), beside.lstat()
    except OSError:
        return folder
    is_roots = above.st_uid == 0 and not above.st_mode & 0o022
    return beside if is_roots and stat.S_ISDIR(found.st_mode) else folder


class Line:
    """Connection to the agent, open from construction to ``close``."""

    def __init__(self, folder: Path) -> None:
        """Connect. Raises NoAgentYet if no agent listens, or no descriptor is left; TransportError
        for a link or a file in its place, or another user's agent."""
        path = folder / SOCKET_NAME
        try:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise NoAgentYet(f"no socket for the agent of this node: {error}") from error
        try:
            self._sock.setblocking(False)
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise TransportError(f"{path} is not a socket")
            self._sock.connect(str(path))
            user, trusted = user_of(self._sock), {0, folder.lstat().st_uid}
            if user not in trusted:
                problem = f"{path} is user {user}'s, not root's or the folder's owner's"
                raise TransportError(problem)
        except OSError as error:
            self.close()
            raise NoAgentYet(f"no agent of this node at {path}: {error}") from error
        except TransportError:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor, readable when a message has come."""
        return self._sock.fileno()

    def send_message(self, message: ToAgent, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; return whether the socket took it. The descriptors stay the caller's.
        Raises TransportError if the agent is gone."""
        try:
            if descriptors:
                socket.send_fds(self._sock, [encode(message)], list(descriptors))
            else:
                self._sock.send(encode(message))
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransportError(f"the node's agent has ended: {error}") from error
        return True

    def receive(self) -> ToWorker | None:
        """Return the next message, or None. Raises TransportError if the agent is gone, or the
        message is invalid."""
        try:
            data = self._sock.recv(MAX_MESSAGE)
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(f"the node's agent has ended: {error}") from error
        if not data:
            raise TransportError("the node's agent has ended")
        try:
            return to_worker.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransportError(
                f"the node's agent does not follow the protocol: {error}"
            ) from error

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._sock.close()


def check_hello(message: ToWorker) -> Hello:
    """Return an agent's first message. Raises TransportError for another message or version."""
    if not isinstance(message, Hello):
        raise TransportError(f"the node's agent sent {type(message).__name__} instead of Hello")
    if message.version != VERSION:
        problem = f"the node's agent speaks version {message.version}"
        raise TransportError(f"{problem}, allowed is {VERSION}")
    return message
