"""Unmodified clients against a real stack: ``make clients`` (``python -m tests.clients``).

Raises a router, a prefill and a decode worker, runs the suite of each environment, and writes what
was shown to shown.json, of which `make reference-pages` makes docs/reference/clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEY = "clients"
SUITE_SECONDS = 1500.0
SCRIPTED_SECONDS = 30.0
APART = {
    "agents": ["test_agents.py", "test_openai_agents.py"],
    **{name: [f"test_{name}.py"] for name in ("instructor", "aiperf", "guidellm")},
}
"""Files of tests by the environment that they want; all others run in ``packages``."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.clients", description="See README.md.")
    made.add_argument("--environments", type=Path, default=ROOT / ".tools" / "clients")
    made.add_argument(
        "--only", nargs="*", default=[], help="files of the suite; other clients' rows stay"
    )
    made.add_argument("--prefill", type=int, default=1, help="0 serves without hand-off")
    return made


def calling_model(source: Path, folder: Path) -> Path:
    """A copy of the model whose chat template reads tools, which SmolLM2's own does not."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["chat_template"] = (HERE / "template.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def suites(only: list[str]) -> dict[str, list[str]]:
    files = sorted(path.name for path in (HERE / "suite").glob("test_*.py"))
    apart = {name for names in APART.values() for name in names}
    found = {"packages": [name for name in files if name not in apart], **APART}
    if only:
        found = {place: [name for name in names if name in only] for place, names in found.items()}
    return {place: names for place, names in found.items() if names}


def run(python: Path, files: list[str], env: dict[str, str]) -> list[list[str]] | None:
    """What the tests of one environment have shown, or None where one failed."""
    suite = HERE / "suite"
    shown = Path(env["TANDEM_CLIENTS_SHOWN"])
    shown.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-c", str(suite / "pytest.toml")]
    command += [str(suite / name) for name in files]
    done = subprocess.run(command, env=env, cwd=suite, check=False, timeout=SUITE_SECONDS)
    return None if done.returncode else json.loads(shown.read_text())


@contextmanager
def scripted(wanted: bool) -> Iterator[str]:
    """The address of the model that follows a script; none where no agent is tried."""
    if not wanted:
        yield ""
        return
    command = [sys.executable, "-m", "tests.clients.scripted"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait(SCRIPTED_SECONDS)


def main() -> int:
    """Raise the stack, run all, write what was shown."""
    from client import held_after
    from scripts.reference.clients import SHOWN, pins
    from stack import Stack

    from tandem.hub import DEFAULT_MODEL, prepare

    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-clients-"))
    model = calling_model(prepare(DEFAULT_MODEL, progress=False).path, folder / "model")
    shown: dict[str, dict[str, list[str]]] = {}
    failed = []
    flags = {"router_flags": ["--api-key", KEY], "prefill": options.prefill}
    wanted = suites(options.only)
    with (
        scripted("agents" in wanted) as address,
        Stack.running(str(model), folder / "stack.log", **flags)
        if set(wanted) != {"agents"}
        else nullcontext() as stack,
    ):
        env = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch a list of prices
            "TANDEM_CLIENTS_ENVIRONMENTS": str(options.environments.absolute()),
            "TANDEM_CLIENTS_KEY": KEY,
            "TANDEM_CLIENTS_MODEL": str(model),
            "TANDEM_CLIENTS_SCRIPTED": address,
            "TANDEM_CLIENTS_SHOWN": str(folder / "shown.json"),
        }
        if stack is not None:
            env["TANDEM_CLIENTS_URL"] = stack.url
            env["TANDEM_CLIENTS_WORKERS"] = " ".join(
                f"http://127.0.0.1:{port}/metrics" for port in stack.probes.values()
            )
        for place, files in wanted.items():
            python = options.environments.absolute() / place / "bin" / "python"
            found = run(python, files, env)
            if found is None:
                failed.append(place)
            for client, feature, test in found or []:
                shown.setdefault(client, {}).setdefault(feature, []).append(test)
        if stack is not None and (left := held_after(stack, 20.0)):
            failed.append(f"still held: {left}")
    if failed:
        print(f"failed: {', '.join(failed)}; log in {folder}")
        return 1
    shutil.rmtree(folder)
    kept = json.loads(SHOWN.read_text()) if options.only else {}
    kept |= {name: {"version": pins()[name], "shown": shown[name]} for name in shown}
    SHOWN.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    print(f"written: {SHOWN.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent / "e2e"), str(ROOT)]  # the stack; the page's maker
    sys.exit(main())
