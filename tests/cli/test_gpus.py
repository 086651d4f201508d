"""Workers of a local stack take one GPU after the other."""

import pytest

from tandem.cli.serve.gpus import VISIBLE, environment_of, used_share, visible_gpus


def test_each_worker_sees_its_own_gpu_first():
    """And all others behind it; a third worker on two GPUs shares the first."""
    seen = [environment_of(number, ["0", "1"])[VISIBLE] for number in range(3)]
    assert seen == ["0,1", "1,0", "0,1"]


@pytest.mark.parametrize("gpus", [[], ["3"]])
def test_nothing_is_said_where_there_is_no_choice(gpus):
    """One GPU or none: the environment stays as it is."""
    assert environment_of(1, gpus) == {}


def test_what_the_environment_allows_is_taken(monkeypatch):
    """Names of any kind, in its order; an empty list hides all."""
    monkeypatch.setenv(VISIBLE, "GPU-b, GPU-a")
    assert visible_gpus() == ["GPU-b", "GPU-a"]
    monkeypatch.setenv(VISIBLE, "")
    assert visible_gpus() == []


def test_a_machine_without_the_tool_has_none(monkeypatch, tmp_path):
    """No error: a CPU serves, too."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("says", "share"), [("echo 1024, 4096", 0.25), ("echo '[N/A], [N/A]'", None), ("exit 6", None)]
)
def test_the_driver_says_how_full_a_gpu_is(says, share, monkeypatch, tmp_path):
    """Or does not: of a GPU that it has by another name, or in another form."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --id=GPU-b ] && {says}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert used_share("GPU-b") == share
    assert used_share("GPU-a") is None
