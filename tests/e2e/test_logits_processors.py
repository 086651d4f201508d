"""A package of logits processors through prefill and decode, over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from conftest import StackMaker
from tests.engine_run.plugins import NAME, write_plugin

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOKEN = 42


@pytest.mark.nightly
def test_a_processor_draws_the_first_token_and_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_stack: StackMaker
) -> None:
    """P's token 1 and D's, which is told how many there were; unknown names are 400."""
    folder = tmp_path / "plugin"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(write_plugin(folder)))
    prompt = {"prompt": "The sea " * 20, "max_tokens": 6, "temperature": 0}
    with start_stack() as stack, httpx.Client(base_url=stack.url, timeout=60) as client:

        def ask(**extra: object) -> httpx.Response:
            body = {**prompt, "return_token_ids": True, "vllm_xargs": extra}
            return client.post("/v1/completions", json=body)

        for times in (1, 3):
            tokens = ask(only_token=TOKEN, only_times=times).json()["choices"][0]["token_ids"]
            assert tokens[:times] == [TOKEN] * times
            assert TOKEN not in tokens[times:]
        assert stack.total("prefill-0", "vllm:prompt_tokens_total") > 0
        for wrong, param in (({"onyl": 1}, "vllm_xargs.onyl"), ({"only_token": -1}, "only_token")):
            answer = ask(**wrong)
            assert answer.status_code == 400
            assert param in answer.json()["error"]["param"]
        flags = ["--logits-processors", f"{NAME}:Nothing"]
        with (
            pytest.raises(AssertionError, match="ended: 2"),
            start_stack(prefill=0, worker_flags=flags),
        ):
            pass
