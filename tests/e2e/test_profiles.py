"""Profiles of real workers over HTTP: a file of each, with the steps that ran meanwhile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from conftest import StackMaker
from tests import clear_text
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ADMIN = {"Authorization": "Bearer boss"}


@pytest.mark.nightly
def test_each_worker_writes_what_it_did(start_stack: StackMaker, tmp_path: Path) -> None:
    """P and D, for the administrator alone; without a folder the flag is named."""
    flags = ["--max-model-len", "512", "--torch-profiler-dir", str(tmp_path)]
    keys = ["--admin-api-key", "boss", "--api-key", "user"]
    with start_stack(worker_flags=flags, router_flags=keys) as stack:
        user = {"Authorization": "Bearer user"}
        assert clear_text.post(f"{stack.url}/start_profile", headers=user).status_code == 401
        started = clear_text.post(f"{stack.url}/start_profile", headers=ADMIN, timeout=150)
        assert started.status_code == 200, started.text
        again = clear_text.post(f"{stack.url}/start_profile", headers=ADMIN, timeout=150)
        assert (again.status_code, "already" in again.json()["message"]) == (503, True)
        body = {"prompt": "a " * 100, "max_tokens": 4}
        asked = clear_text.post(
            f"{stack.url}/v1/completions", json=body, headers=ADMIN, timeout=150
        )
        assert asked.status_code == 200, asked.text
        stopped = clear_text.post(f"{stack.url}/stop_profile", headers=ADMIN, timeout=120)
        assert stopped.status_code == 200, stopped.text
        wait_for(lambda: len(list(tmp_path.glob("[!w]*.pt.trace.json.gz"))) == 2)
        for path in tmp_path.glob("*.pt.trace.json.gz"):
            assert str(path) in stopped.json()["message"]
            assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
