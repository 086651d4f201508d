"""Which model a worker's command line names, and under which name its KV goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

from tandem.engine.config import EngineConfig
from tandem.hub import prepare

pytestmark = pytest.mark.full

ASK = """
import sys
from tandem.cli.settings.command import parse
from tandem.cli.settings.worker_settings import engine_config, worker_sections
config = engine_config(parse("prefill", "", worker_sections(), sys.argv[1:]))
print(config.model.model, config.revision, sep="\\n")
"""
MAIN, TAGGED = "a" * 40, "b" * 40
"""Commits."""


@pytest.fixture
def home(smollm2: Path, tmp_path: Path) -> Path:
    """A cache of the hub that holds two commits of org/x: main, and what v1.1 names."""
    repo = tmp_path / "hub" / "models--org--x"
    (repo / "refs").mkdir(parents=True)
    for name, commit in {"main": MAIN, "v1.1": TAGGED}.items():
        (repo / "refs" / name).write_text(commit)
        folder = repo / "snapshots" / commit
        folder.mkdir(parents=True)
        for file in smollm2.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file.resolve())
        config = json.loads((smollm2 / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "of": commit}))
    return tmp_path


def said(home: Path, program: str, *words: str) -> list[str]:
    """Lines that a program prints, in a process of its own, as the hub's client reads the
    environment once."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def config_of(home: Path, *words: str) -> tuple[Path, str]:
    """Folder and revision of a worker's config."""
    folder, revision = said(home, ASK, "--device", "cpu", *words)[-2:]
    return Path(folder), revision


def test_a_revision_of_a_hub_id_is_what_is_served(home: Path):
    """And its KV goes under its content: two caches may hold different commits of one branch."""
    folder, revision = config_of(home, "--model", "org/x", "--revision", "v1.1")
    assert folder.name == TAGGED
    assert revision == prepare(str(folder)).fingerprint

    folder, other = config_of(home, "--model", "org/x")
    assert folder.name == MAIN
    assert other == prepare(str(folder)).fingerprint != revision

    (home / "hub" / "models--org--x" / "refs" / "v1.1").write_text(MAIN)
    assert config_of(home, "--model", "org/x", "--revision", "v1.1") == (folder, other)


def test_made_up_weights_of_a_revision_go_under_their_seed(home: Path):
    """They are no weights of that commit."""
    words = ["--model", "org/x", "--revision", "v1.1", "--load-format", "dummy"]
    folder, revision = config_of(home, *words)
    assert folder.name == TAGGED
    assert revision not in ("v1.1", prepare(str(folder), weights=False).fingerprint)


def test_a_digest_of_a_folder_stands(smollm2: Path, home: Path):
    assert config_of(home, "--model", str(smollm2), "--revision", "known")[1] == "known"


def test_offline_a_revision_of_a_hub_id_is_what_is_loaded(home: Path):
    ask = (
        "from tandem.llm import LLM\n"
        "with LLM('org/x', revision='v1.1', device='cpu', max_model_len=256) as llm:\n"
        "    print(llm.card.fingerprint.revision)\n"
    )
    tagged = home / "hub" / "models--org--x" / "snapshots" / TAGGED
    assert said(home, ask)[-1] == prepare(str(tagged)).fingerprint


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_of_a_worker_has_a_bound_of_its_queue(
    role: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's own engine (LLM) has none."""
    command, seen = import_module(f"tandem.cli.serve.{role}"), Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(command, "engine_config", seen)
    monkeypatch.setattr(command, "set_up_logging", Mock())
    monkeypatch.setattr(command, "dump_on_signal", Mock())
    with pytest.raises(KeyboardInterrupt):
        command.run(["--model", "m"])
    bounded = EngineConfig.of(smollm2, device="cpu", **seen.call_args.kwargs).scheduler
    assert (bounded.max_num_queued_reqs, bounded.max_num_queued_tokens) == (8_192, 64_000_000)
    assert EngineConfig.of(smollm2, device="cpu").scheduler.max_num_queued_reqs is None
