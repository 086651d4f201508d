"""Which tests may run beside which, where several processes run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("tests/chaos/test_proxy.py", "tests/chaos/test_harness.py", "tests/operator/test_queue.py")
RAN = re.compile(r"^\[(gw\d)\].* PASSED (\S+?)::", re.MULTILINE)


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
        [sys.executable, "-m", "pytest", *words, *FILES],
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
    assert set(ran) == set(FILES)
    assert len(set().union(*ran.values())) == 1, ran
