"""Which tests may run beside which, where several processes run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tests.conftest import FIRST, HURT, LONG, room_of, turn_of

ROOT = Path(__file__).parents[1]
CHAOS = ("tests/chaos/test_proxy.py", "tests/chaos/test_harness.py")
OPERATOR = ("tests/operator/test_queue.py", "tests/operator/test_store.py")
RAN = re.compile(r"^\[(gw\d)\].* PASSED (\S+?)::", re.MULTILINE)


@pytest.mark.full
def test_the_files_of_rooms_that_share_something_stay_in_one_process() -> None:
    """Else each process raises its own stacks, and rooms that share something meet."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [
        "-n",
        "2",
        "--dist",
        "loadscope",
        "-v",
        "-k",
        "not any_server",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *CHAOS, *OPERATOR],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    ran: dict[str, set[str]] = defaultdict(set)
    for process, file in RAN.findall(done.stdout):
        ran[file].add(process)
    assert set(ran) == {*CHAOS, *OPERATOR}
    for room in (CHAOS, OPERATOR):
        assert len(set().union(*(ran[each] for each in room))) == 1, ran


@pytest.mark.parametrize("fixture", ["pair", "hurt"])
def test_a_stack_that_files_share_is_raised_by_one_process(fixture: str) -> None:
    """All that ask for it are in the same half of e2e."""
    asks = re.compile(rf"\b{fixture}: Stack\b")
    files = [
        each for each in (ROOT / "tests/e2e").glob("test_*.py") if asks.search(each.read_text())
    ]
    assert len(files) > 1
    assert len({room_of(each) for each in files}) == 1


def test_halves_of_e2e_begin_first() -> None:
    """By names that are there."""
    halves = {room_of(each) for each in (ROOT / "tests/e2e").glob("test_*.py")}
    assert halves == set(FIRST[:2])
    assert all((ROOT / f"tests/e2e/test_{name}.py").exists() for name in HURT)


def test_no_third_process_raises_stacks_beside_the_halves_at_first() -> None:
    """Chaos comes behind the half that hurts stacks, in one process with it; what is short comes
    last."""
    chaos, operator, hurt = ROOT / CHAOS[0], ROOT / OPERATOR[0], ROOT / "tests/e2e/test_faults.py"
    short, long = ROOT / "tests/cli/test_up.py", [ROOT / "tests" / each for each in LONG]
    backwards = [short, *long, operator, chaos, hurt]
    assert sorted(backwards, key=turn_of) == [hurt, chaos, operator, *long, short]
    assert room_of(chaos) == room_of(hurt) != room_of(operator)
    assert all(each.exists() for each in long)
