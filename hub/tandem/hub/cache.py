"""Cache of prepared folders, each of which is built once and never changed.

An entry is built in a temporary folder, synced and renamed, so an existing entry is complete. A
lock file excludes other builders.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tandem.hub.errors import CacheBusy
from tandem.protocol.names import ENV_CACHE

_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 10
_BLOCKS = 64


def sampled_digest(path: Path, head: int = 0) -> bytes:
    """Return blake2b-128 over the size, the first ``head`` bytes and samples.

    The head is at least a MiB; the samples are 64 blocks of 4 KiB, evenly spread.
    """
    size = path.stat().st_size
    state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        state.update(file.read(_HEAD_BYTES))
        for at in range(_HEAD_BYTES, head, _HEAD_BYTES):
            state.update(file.read(min(_HEAD_BYTES, head - at)))
        if size > _HEAD_BYTES:
            last = size - _BLOCK_BYTES
            for block in range(_BLOCKS):
                file.seek(last * (block + 1) // _BLOCKS)
                state.update(file.read(_BLOCK_BYTES))
    return state.digest()


BUILD_DEADLINE_S = 3600.0
"""Maximum wait for another process that prepares the same model."""


def cache_root(cache_dir: Path | None = None) -> Path:
    """Return ``cache_dir``, else ``$TANDEM_CACHE``, else tandem in the user's cache folder."""
    if cache_dir is not None:
        return cache_dir.expanduser().absolute()
    if own := os.environ.get(ENV_CACHE):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "tandem"


def build_once(
    entry: Path, build: Callable[[Path], None], *, deadline_s: float = BUILD_DEADLINE_S
) -> Path:
    """Return ``entry``, after ``build(folder)`` has filled it if it did not exist.

    The folder is empty, on the same file system, and removed if ``build`` raises. Raises CacheBusy
    after ``deadline_s``.
    """
    if entry.is_dir():
        return entry
    from filelock import FileLock, Timeout  # missing in the router's image

    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = entry.with_name(f"{entry.name}.lock")
    try:
        with FileLock(lock, timeout=deadline_s):
            return entry if entry.is_dir() else _build(entry, build)
    except Timeout as timeout:
        raise CacheBusy(
            f"another process has been preparing {entry} for over {deadline_s:.0f} s; "
            f"find the process that holds {lock}"
        ) from timeout


def _build(entry: Path, build: Callable[[Path], None]) -> Path:
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    partial.mkdir()
    try:
        build(partial)
        for each in partial.rglob("*"):
            _write_through(each)
        _write_through(partial)
        partial.rename(entry)
        _write_through(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entry


def _write_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # not supported by some network file systems
            raise
    finally:
        os.close(descriptor)
