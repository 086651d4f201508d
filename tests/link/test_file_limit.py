"""The limit on open files is raised as far as it may be, and said where that is too little."""

import resource
import subprocess
import sys

import pytest

from tandem.link.sockets import ENOUGH, ROOM, raise_descriptor_limit
from tandem.protocol.errors import TandemError

TABLE = """
import re
from pathlib import Path
from tandem.link.sockets import raise_descriptor_limit

size = lambda: int(re.search(r"FDSize:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before, opened = size(), len(list(Path("/proc/self/fd").iterdir()))
limit = raise_descriptor_limit(1)
print(before, size(), limit, len(list(Path("/proc/self/fd").iterdir())) - opened)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "now"),
    [
        (1024, 20_000, 20_000),
        (1024, 1 << 30, ENOUGH),
        (1024, resource.RLIM_INFINITY, ENOUGH),
        (20_000, 20_000, 20_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, ENOUGH),
        (1 << 22, 1 << 22, 1 << 22),
    ],
)
def test_the_soft_limit_goes_up_to_the_hard_one(monkeypatch, soft, hard, now):
    """Never down, and not beyond what is of use."""
    was = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: was[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: was.append(limits))
    assert raise_descriptor_limit() == now
    changed = soft != resource.RLIM_INFINITY and soft < min(now, ENOUGH)
    assert was[1:] == ([(now, hard)] if changed else [])


def test_too_few_are_an_error_that_says_what_to_do(monkeypatch):
    """It names the limit, what is needed, and who may change it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    with pytest.raises(TandemError, match=r"may open 512 files .* needs 1024 .*ulimit"):
        raise_descriptor_limit()


@pytest.mark.parametrize("hard", [None, 700])
def test_the_table_of_descriptors_is_large_from_the_start(hard):
    """A process of threads stands for milliseconds whenever it grows; nothing stays open. Where
    fewer are allowed, it has room for those."""

    def limited() -> None:
        if hard is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    done = subprocess.run(
        [sys.executable, "-c", TABLE], preexec_fn=limited, capture_output=True, check=True
    )
    before, after, limit, opened = map(int, done.stdout.split())
    assert before < 700
    assert after >= min(limit, ROOM)
    assert opened == 0
