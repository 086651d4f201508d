"""What tests of several rooms share: the embedded model, and which tests may run beside which."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.small_model import write_small_model
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tandem.engine.threads import spin_briefly
from tandem.hub import DEFAULT_MODEL, prepare

gc.disable()  # until all is collected: half of that would be looks at modules that stay
EXAMPLES = os.environ.get("TANDEM_EXAMPLES", "same" if "CI" in os.environ else "random")
"""Of Hypothesis: ``random`` ones are others each time; with the ``same``, what fails in CI fails
everywhere, and for the change that it belongs to."""
assert EXAMPLES in ("same", "random"), f"TANDEM_EXAMPLES is {EXAMPLES!r}; allowed: same, random"
# A busy machine may hold any example up; all else as without, in CI, too.
_drawn = settings(deadline=None, derandomize=EXAMPLES == "same")
settings.register_profile("tandem", _drawn)
settings.load_profile("tandem")
spin_briefly()  # said here, as tests import torch before an executor could say it

ALONE = {"e2e": "stacks", "operator": "operator", "chaos": "hurt", "screens": "ui"}
"""Rooms of tests whose files share something of the machine, and by which name they run in one
process: chaos behind what else hurts stacks, so that no third process raises stacks beside two. An
operator's tests take as long as either, and wait more than they compute."""
HURT = ("faults", "prompt_embeds", "pulls", "structured_faults", "traces")
"""Of e2e, beside the rest: what kills workers of shared stacks, and some more. With chaos it takes
four fifths of what the rest does."""
FIRST = ("stacks", "hurt", "operator", "ui")
"""They take the longest, in this order, and begin first: what is short fills up the end."""
LONG = ("kvtransfer/test_processes.py",)
"""Files of over half a minute that share nothing: they follow at once."""


def room_of(path: Path) -> str:
    """By which name the tests of a file run in one process: a file's own path, unless it is of a
    room that is alone."""
    if path.parent.name == "e2e" and path.stem.removeprefix("test_") in HURT:
        return "hurt"
    return ALONE.get(path.parent.name, str(path))


def turn_of(path: Path) -> tuple[int, int, bool]:
    """When a file's tests come: by its room, within that by its folder, and the longest first."""
    room, folder = room_of(path), path.parent.name
    is_short = "/".join(path.parts[-2:]) not in LONG
    return (*FIRST, room).index(room), (*ALONE, folder).index(folder), is_short


def pytest_configure() -> None:
    """A background job of a shell ignores SIGINT, and so would every process that tests start: they
    would never end at the Ctrl-C that a test sends."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Rooms(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests stay in one process, so that its fixtures are made once; so do rooms that are
    alone. By the path in a test's id: xdist's own groups write a name into it that pytest 9.2 does
    not read, and every test would be a group of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return room_of(Path(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Rooms:
    """With several processes: who runs what. This one collects nothing."""
    gc.enable()
    return Rooms(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each of several processes is told the same: the longest first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn_of(item.path))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector of garbage need not look at it again and again."""
    gc.enable()
    gc.freeze()


class Unfreezing:
    """Unfreezes the collector's objects, and remembers it: to count frozen ones takes 20 ms."""

    happened = False

    def __init__(self) -> None:
        self._unfreeze = gc.unfreeze

    def __call__(self) -> None:
        self.happened = True
        self._unfreeze()


gc.unfreeze = unfreezing = Unfreezing()


def pytest_runtest_teardown() -> None:
    """Freeze again what a test has unfrozen: each full pass over all modules takes a second."""
    if unfreezing.happened:
        unfreezing.happened = False
        gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The prepared folder of the embedded default: SmolLM2-135M-Instruct, weights in float32."""
    return prepare(DEFAULT_MODEL, progress=False).path


@pytest.fixture(scope="session")
def small(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of random weights with SmolLM2's tokenizer: a hundredth of its work."""
    return write_small_model(smollm2, tmp_path_factory.mktemp("model") / "small")
