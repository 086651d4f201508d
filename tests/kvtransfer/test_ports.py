"""Which networks a worker's KV can be read from: those that its control socket is on, no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.protocol.exposure import is_loopback

LISTENING = """
import psutil
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.transports.choose import make_transports
from tandem.protocol.ids import new_incarnation

transports = make_transports(KVTransferConfig(kv_connector="{connector}"), new_incarnation(), "p")
for transport in transports.values():
    transport.serve(SlotMemory(2, 4096))
for each in psutil.Process().net_connections("inet"):
    if each.status == psutil.CONN_LISTEN:
        print(each.laddr.ip)
"""


@pytest.mark.timeout(240)  # each is a process of its own, which imports NIXL
@pytest.mark.parametrize(
    "connector", [*(pytest.param(each, marks=pytest.mark.full) for each in ("tcp", "nixl")), "auto"]
)
def test_on_the_loopback_no_other_machine_can_ask_for_kv(connector: str):
    """UCX, left to itself, listens on the machine's own addresses as well."""
    words = [sys.executable, "-c", LISTENING.format(connector=connector)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(), "nothing listens at all"
    assert all(map(is_loopback, done.stdout.split())), done.stdout
