"""Fixtures and settings of all tests: the prepared models, Hypothesis, and the mark of the core."""

import functools
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from tests.dense_model import write_dense_model
from tests.small_model import write_small_model

from tandem.engine.threads import spin_briefly
from tandem.hub import DEFAULT_MODEL, prepare

gc.disable()  # until all is collected: half of that would be looks at modules that stay
EXAMPLES = os.environ.get("TANDEM_EXAMPLES", "same" if "CI" in os.environ else "random")
"""Examples of Hypothesis: ``random`` ones differ each time; the ``same`` ones fail in CI and
everywhere else, for the change that broke them."""
assert EXAMPLES in ("same", "random"), f"TANDEM_EXAMPLES is {EXAMPLES!r}; allowed: same, random"
# A busy machine may hold any example up; all else as without, in CI, too.
_drawn = settings(deadline=None, derandomize=EXAMPLES == "same")
settings.register_profile("tandem", _drawn)
settings.load_profile("tandem")
spin_briefly()  # set here, as tests import torch before an executor could set it


def pytest_configure() -> None:
    """A background job of a shell ignores SIGINT, and so would every process that tests start: they
    would never end at the Ctrl-C that a test sends."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the core: those below ``testpaths`` that no dearer tier has."""
    core = tuple(config.rootpath / path for path in config.getini("testpaths"))
    dearer = {"full", "nightly", "cluster"}

    @functools.cache
    def is_below(file: Path) -> bool:
        return any(file.is_relative_to(path) for path in core)

    for item in items:
        if is_below(item.path) and dearer.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("core")


def pytest_collection_finish() -> None:
    """Freeze what is loaded by now: the collector of garbage need not visit it again and again."""
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
    """The prepared folder of the embedded default: SmolLM2-135M-Instruct, weights in Q4_1."""
    return prepare(DEFAULT_MODEL, progress=False).path


@pytest.fixture(scope="session")
def dense_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same model with decoded weights, in float32, as transformers reads it."""
    return write_dense_model(smollm2, tmp_path_factory.mktemp("dense") / "smollm2")


@pytest.fixture(scope="session")
def small(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of random weights with SmolLM2's tokenizer: a hundredth of its work."""
    return write_small_model(smollm2, tmp_path_factory.mktemp("model") / "small")
