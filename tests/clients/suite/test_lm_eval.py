"""lm-eval, in an environment of its own: tasks of tests/clients/lm_eval, judged by transformers."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "lm-eval")
PROGRAM = str(Path(os.environ["TANDEM_CLIENTS_ENVIRONMENTS"]) / "lm-eval/bin/lm_eval")
MODEL = os.environ["TANDEM_CLIENTS_MODEL"]
TASKS = Path(__file__).parents[1] / "lm_eval"
SECONDS = 140.0
CLOSE = 0.02
"""Two ways to sum the same products in 32 bits differ by less, in a text's log-likelihood."""


def samples(out: Path, model: str, settings: str, *more: str) -> dict[str, list[Any]]:
    """What a model answered to each document of each task, in order."""
    command = [PROGRAM, "run", "--model", model, "--model_args", settings, *more]
    command += ["--tasks", "tandem_capitals,tandem_continuations", "--include_path", str(TASKS)]
    command += ["--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "home")}
    env = {**os.environ, **offline, "OPENAI_API_KEY": served.KEY}
    done = subprocess.run(
        command, env=env, cwd=TASKS, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for task in ("capitals", "continuations"):
        (path,) = out.rglob(f"samples_tandem_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[task] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return found


@covers("logprobs", "batch")
@pytest.mark.timeout(300)
def test_tasks_come_out_as_with_transformers(tmp_path: Path) -> None:
    """Log-likelihoods are those of transformers, greedy or not, and generated texts the same."""
    place = f"model={served.MODEL},base_url={served.BASE}/completions,tokenizer={MODEL}"
    place += ",tokenizer_backend=huggingface,num_concurrent=4,max_retries=1"
    ours = samples(tmp_path / "ours", "local-completions", place)
    settings = f"pretrained={MODEL},dtype=float32"
    theirs = samples(tmp_path / "theirs", "hf", settings, "--device", "cpu")

    assert ours["continuations"] == theirs["continuations"]
    assert len(ours["capitals"]) == 8
    for our, their in zip(ours["capitals"], theirs["capitals"], strict=True):
        for [[value, greedy]], [[expected, best]] in zip(our, their, strict=True):
            assert float(value) == pytest.approx(float(expected), abs=CLOSE)
            assert str(greedy) == str(best)
