"""NIXL's metadata of a peer is refused where it is not whole, and the right one is taken after."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.kvtransfer.fuzz.words import EXAMPLES

SECONDS = 300


@pytest.mark.nightly
def test_spoiled_cards_end_no_process_and_poison_nothing() -> None:
    """Cards that were changed on their way, and those of authenticated peers that lie: each is a
    TransportError or of no use, and reads over the right one bring the right bytes."""
    count = EXAMPLES or 60
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvtransfer.fuzz.nixl_child", "1", str(count)],
        capture_output=True,
        text=True,
        timeout=SECONDS if not EXAMPLES else None,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["right"] == 1, told
    assert told["refused"] >= count // 2, told
    assert sum(told.values()) == 2 * count + 1
