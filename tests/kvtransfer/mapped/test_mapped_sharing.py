"""What the kernel itself keeps from who was given a worker's memory, or is another user."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kvtransfer.mapped.worker import KEY, SECONDS, TAG, Worker

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.kvtransfer.transports.mapped.wire import decode_card
from tandem.memory import shared


def test_memory_that_could_be_shortened_is_not_mapped(producer: Worker) -> None:
    """An access behind the end of a shortened file kills the process: what is shared is sealed, and
    what is not is refused."""
    kv_cache, size = HostCopier().share(producer.kv_cache)
    plain = os.memfd_create("plain")
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(kv_cache, 1)
        HostCopier().map(kv_cache, size).close()
        os.ftruncate(plain, size)
        with pytest.raises(TransportError, match="not sealed"):
            HostCopier().map(plain, size)
    finally:
        os.close(kv_cache)
        os.close(plain)


def test_who_was_given_memory_cannot_write_it(producer: Worker) -> None:
    """The system refuses a writable mapping of what was shared; its owner writes on."""
    descriptors = [HostCopier().share(producer.kv_cache), producer.blocks.tags.share()]  # type: ignore[attr-defined]
    for descriptor, size in descriptors:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size)
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
        os.close(descriptor)
    producer.kv_cache.fill_(9)
    producer.blocks.tags.set(KEY, 1, TAG)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_cannot_call(producer: Worker, folder: Path) -> None:
    """The socket is its user's alone: who has the secret, but another user's process, is not let in
    by the system, so that P need not ask who calls."""
    folder.chmod(0o755)
    card = decode_card(producer.transport.serve(producer.slots, producer.blocks))
    program = """
import os, socket, sys
if sys.argv[2] != "0":
    os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""
    path = str(folder / card.name)
    for user, said in (("0", b""), ("65534", b"PermissionError")):
        words = [sys.executable, "-c", program, path, user]
        done = subprocess.run(words, check=False, capture_output=True, timeout=SECONDS)
        assert said in done.stderr
        assert (done.returncode == 0) is (user == "0")


def test_what_is_mapped_where_another_has_just_gone_is_not_forgotten_for_it() -> None:
    """Addresses are free a moment before the one that had them is forgotten."""
    memory = shared.shared_tensor(4096)
    gone = shared.SharedMemory.make(4096)
    shared._forget(memory.data_ptr(), gone)
    assert gone.descriptor == -1
    descriptor, size = shared.descriptor_of(memory)
    os.close(descriptor)
    assert size == 4096
