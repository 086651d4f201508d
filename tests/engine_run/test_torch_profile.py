"""Profiles of steps: what they hold, when they end, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.cpu_engine import CPUEngine
from tests.waiting import wait_for

from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.worker.worker import MOST_SECONDS, WRITE_SECONDS, ProfileError, TorchProfile
from tandem.llm import LLM
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import RequestFailed

pytestmark = pytest.mark.full

PROMPTS = [list(range(40, 90))]


def names_in(path: str) -> set[str]:
    wait_for(Path(path).exists, WRITE_SECONDS)
    content = json.loads(gzip.decompress(Path(path).read_bytes()))
    return {each.get("name", "") for each in content["traceEvents"]}


def call(engine: CPUEngine, name: CommandName) -> Reply:
    return engine.core.call(Command(id=1, name=name))


@pytest.mark.parametrize(
    "executor", [UniProcExecutor, pytest.param(MultiprocExecutor, marks=pytest.mark.nightly)]
)
def test_a_profile_holds_the_operations_of_steps(
    smollm2: Path, tmp_path: Path, executor: Any
) -> None:
    """In this process or in a child's, and tokens are as without one; twice in a row."""
    folder = tmp_path / "made"
    engine = CPUEngine(
        smollm2, executor=executor(), torch_profiler_dir=str(folder), max_model_len=256
    )
    try:
        before = engine.generate(PROMPTS, 4)
        for _ in range(2):
            started = call(engine, CommandName.START_PROFILE)
            assert started.ok, started.message
            assert engine.generate(PROMPTS, 4) == before
            stopped = call(engine, CommandName.STOP_PROFILE)
            assert (stopped.ok, stopped.message) == (True, started.message)
            assert Path(stopped.message).parent == folder
            assert any(name.startswith("aten::") for name in names_in(stopped.message))
            Path(stopped.message).unlink()
        assert "no profile is being recorded" in call(engine, CommandName.STOP_PROFILE).message
    finally:
        engine.executor.stop()


def test_one_is_made_at_a_time_and_ends_by_itself(tmp_path: Path) -> None:
    """After a while, with the next step; its file is there."""
    now = [0.0]
    profile = TorchProfile(0, on_gpu=False, clock=lambda: now[0])
    path = profile.start(str(tmp_path))
    with pytest.raises(ProfileError, match="already"):
        profile.start(str(tmp_path))
    now[0] = MOST_SECONDS - 1
    assert not profile.overdue
    now[0] = MOST_SECONDS
    assert profile.overdue
    profile.end()
    assert not profile.overdue
    profile.close()
    assert Path(path).stat().st_size > 0
    with pytest.raises(ProfileError, match="no profile"):
        profile.stop()


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    """Before anything is recorded, or when it is gone by the end."""
    (tmp_path / "file").write_text("")
    profile = TorchProfile(0, on_gpu=False)
    with pytest.raises(ProfileError, match="no folder"):
        profile.start(str(tmp_path / "file" / "below"))
    path = Path(profile.start(str(tmp_path / "gone")))
    path.parent.rmdir()
    with pytest.raises(ProfileError, match="could not be written"):
        profile.stop()


def test_offline_a_profile_needs_its_folder(smollm2: Path, tmp_path: Path) -> None:
    with (
        LLM(str(smollm2), device="cpu", max_model_len=128) as llm,
        pytest.raises(RequestFailed, match="--torch-profiler-dir"),
    ):
        llm.start_profile()
    folder = str(tmp_path)
    with LLM(str(smollm2), device="cpu", max_model_len=128, torch_profiler_dir=folder) as llm:
        path = llm.start_profile()
        llm.generate("hello", {"max_tokens": 2}, use_tqdm=False)
        assert llm.stop_profile() == path
        assert any(name.startswith("aten::") for name in names_in(path))
