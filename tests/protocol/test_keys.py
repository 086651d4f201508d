"""Key folders: whole or refused by name, newest first, read again when they change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.curve_keys import write_keys

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.keys import KeyRing


def test_no_folders_is_no_ring() -> None:
    assert KeyRing.load(None, None) is None


def test_the_newest_generation_comes_first(tmp_path: Path) -> None:
    """And a ring sees what is added after it was made."""
    ring = write_keys(tmp_path, decode=9)["decode"]
    assert ring.public_keys("decode") == (ring.public,)
    newer = write_keys(tmp_path, decode=10)["decode"]
    os.utime(tmp_path / "peers", (1, 1))  # as a mount's swap of folders does

    assert ring.public_keys("decode") == (newer.public, ring.public)
    assert ring.knows("decode", newer.public)
    assert not ring.knows("prefill", newer.public)


def test_a_ring_names_what_is_there_now(tmp_path: Path) -> None:
    """Role and generation of each key, for who asks whether a rotation may go on."""
    ring = write_keys(tmp_path, decode=1, router=1)["decode"]
    assert ring.names() == ["decode.1", "router.1"]
    write_keys(tmp_path, decode=2)
    assert ring.names() == ["decode.1", "decode.2", "router.1"]


def test_each_try_takes_the_next_key(tmp_path: Path) -> None:
    """Of all the roles that may be there; none where no key is known."""
    ring = write_keys(tmp_path, router=1, decode=1, prefill=1)["router"]
    tries = [ring.call(("decode", "prefill"), attempt) for attempt in range(3)]

    assert [keys.server for keys in tries if keys] == [
        *ring.public_keys("decode"),
        *ring.public_keys("prefill"),
        *ring.public_keys("decode"),
    ]
    assert tries[0] is not None
    assert tries[0].secret == ring.secret
    assert ring.call(("nobody",), 0) is None


@pytest.mark.parametrize("missing", ["keys", "peers", "curve.secret", "short"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    write_keys(tmp_path, decode=1)
    keys: str | None = str(tmp_path / "decode-1")
    peers: str | None = str(tmp_path / "peers")
    expected = "curve_keys"
    if missing == "keys":
        keys = None
    elif missing == "peers":
        peers, expected = None, "curve_peers"
    elif missing == "short":
        (tmp_path / "decode-1" / "curve.public").write_text("abc")
    else:
        (tmp_path / "decode-1" / missing).unlink()
    with pytest.raises(InvalidParameter, match=expected):
        KeyRing.load(keys, peers)


def test_a_missing_folder_of_peers_is_named(tmp_path: Path) -> None:
    write_keys(tmp_path, decode=1)
    with pytest.raises(InvalidParameter, match="curve_peers"):
        KeyRing.load(str(tmp_path / "decode-1"), str(tmp_path / "nothing"))
