"""A scripted model for agents: ``python -m tests.clients.scripted``.

A router over a worker that reads the prompt and writes what a model would: a call of the shell or
of the tool that reads a file, then what the file says. Prints its address and serves until its
input ends.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.router.openai.test_tool_calls import write_model

from tandem.protocol.card import WorkerRole

MODEL = "scripted"
FILE = "secret.txt"
SECRET = re.compile(r"secret-\d+")
"""What the file says."""
TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}CALLED {{ c.function.name }}\n{% endfor %}{% endfor %}"
    "{# <tool_call> #}"
)
CALLS: dict[str, dict[str, str]] = {
    "exec_command": {"cmd": f"cat {FILE}"},
    "Bash": {"command": f"cat {FILE}", "description": "Read the file"},
    "bash": {"command": f"cat {FILE}", "description": "Read the file"},
    "read_file": {"path": FILE},
}
"""Tools of agents, and the arguments by which each reads the file."""
END = "<|end|>"


def written(prompt: str) -> str:
    results = re.findall(r"^TOOL: .*(?:\n(?![A-Z]+: ).*)*", prompt, re.MULTILINE)
    if results:
        found = SECRET.search(results[-1])
        return f"The file says {found[0]}." if found else f"No secret in {results[-1]!r}"
    tools = re.findall(r"^TOOL (\w+)$", prompt, re.MULTILINE)
    name = next((each for each in CALLS if each in tools), None)
    if name is None:
        return "Reading a file"
    call = json.dumps({"name": name, "arguments": CALLS[name]})
    return f"I read it.\n<tool_call>\n{call}\n</tool_call>"


def serve(folder: Path) -> Served:
    write_model(folder)
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    def behave(turn: Turn) -> Iterator[float]:
        turn.accept()
        prompt = served.tokenizer.decode(
            list(turn.request.prompt_token_ids), skip_special_tokens=False
        )
        tokens = [
            *served.tokenizer.encode(written(prompt), add_special_tokens=False),
            served.tokenizer.eos_token_ids[0],
        ]
        for position, token in enumerate(tokens):
            yield turn.worker.step
            if turn.token(position, token=token):
                return

    worker = FakeWorker(WorkerRole.DECODE, behaviour=behave, max_model_len=1_000_000)
    served = Served(str(folder), [worker], served_model_name=(MODEL,))
    return served


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-scripted-") as folder:
        served = serve(Path(folder))
        print(served.url, flush=True)
        sys.stdin.read()
        served.stop()
        for worker in served.workers:
            worker.stop()


if __name__ == "__main__":
    main()
