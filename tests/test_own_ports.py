"""Ports that stay free between their choice and their use."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.own_ports import BLOCKS, LOWEST, SIZE, own_ports

from tandem.cli.ports import FIRST, LOOPBACK, first_of_connections

ROOT = Path(__file__).parents[1]
PRINTS = "from tests.own_ports import own_ports; print(*own_ports(40), flush=True); input()"


def test_stacks_of_several_processes_take_no_port_of_each_other() -> None:
    """A port is free for seconds between its choice and its use; another half of e2e, or another
    run, took it meanwhile."""
    found = [own_ports(40)]
    with ExitStack() as running:
        for _ in range(2):
            words = [sys.executable, "-c", PRINTS]
            process = running.enter_context(
                subprocess.Popen(words, cwd=ROOT, stdin=-1, stdout=-1, text=True)
            )
            running.callback(process.kill)
            assert process.stdout is not None
            found.append([int(each) for each in process.stdout.readline().split()])
    assert [len(each) for each in found] == [40] * 3
    assert len(set().union(*found)) == 120


def test_nobody_else_is_given_one() -> None:
    """Neither ``tandem up`` for its workers, which draws from ``FIRST`` on, nor a connection: it
    had a port that gRPC was about to listen on."""
    assert LOWEST <= min(own_ports(SIZE // 2)) <= max(own_ports(SIZE // 2)) < FIRST
    assert LOWEST + BLOCKS * SIZE <= FIRST < first_of_connections()


def test_a_taken_port_is_passed_over_and_the_last_come_again_late() -> None:
    """Somebody listens on one whose turn it is."""
    first = own_ports(SIZE // 4)
    assert not set(first) & set(own_ports(SIZE // 4))
    with socket.socket() as taken:
        taken.bind((LOOPBACK, first[0]))
        taken.listen()
        assert first[0] not in own_ports(SIZE // 2) + own_ports(SIZE // 4)
