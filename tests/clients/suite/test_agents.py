"""Agents as people start them: each runs a whole loop of tools with the scripted model.

An agent sends its request, the model calls its shell, the agent runs that and sends the result, and
the model answers with what the file says. Nothing leaves 127.0.0.1: updates and telemetry are off,
and what asks for a proxy finds none.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

URL = os.environ["TANDEM_CLIENTS_SCRIPTED"]
NODE = Path(os.environ["TANDEM_CLIENTS_ENVIRONMENTS"]) / "node"
BIN = NODE / "node_modules" / ".bin"
QUESTION = "Read secret.txt"
SECONDS = 240.0
COVERED: dict[str, list[str]] = {
    "@anthropic-ai/claude-code (npm)": ["messages", "stream", "tools"],
    "@openai/codex (npm)": ["responses", "stream", "tools"],
    "opencode-ai (npm)": ["chat", "stream", "tools"],
}
ALONE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}
Command = tuple[list[str], dict[str, str]]


def codex(home: Path, work: Path) -> Command:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f"""
model = "scripted"
model_provider = "tandem"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.tandem]
name = "Tandem"
base_url = "{URL}/v1"
wire_api = "responses"
env_key = "TANDEM_KEY"
"""
    )
    freely = "--dangerously-bypass-approvals-and-sandbox"
    command = ["codex", "exec", "--skip-git-repo-check", freely, "-C", str(work), QUESTION]
    return command, {"TANDEM_KEY": "none"}


def claude_code(_home: Path, _work: Path) -> Command:
    command = ["claude", "-p", QUESTION, "--model", "scripted", "--allowedTools", "Bash"]
    return command, {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def opencode(_home: Path, work: Path) -> Command:
    """opencode, by chats; it asks for a title, too."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tandem",
        "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
        "models": {"scripted": {"name": "scripted", "tool_call": True, "reasoning": True}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "small_model": "tandem/scripted",
        "permission": {"bash": "allow"},
        "provider": {"tandem": provider},
    }
    (work / "opencode.json").write_text(json.dumps(settings))
    return ["opencode", "run", "--model", "tandem/scripted", QUESTION], {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


AGENTS: dict[str, Callable[[Path, Path], Command]] = {
    "@anthropic-ai/claude-code (npm)": claude_code,
    "@openai/codex (npm)": codex,
    "opencode-ai (npm)": opencode,
}


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(agent, marks=pytest.mark.covers(agent, *features))
        for agent, features in COVERED.items()
    ],
)
def test_a_program(agent: str, tmp_path: Path) -> None:
    """It exits with 0, and its last words are what the file said."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    secret = f"secret-{random.randrange(10**9)}"
    (work / "secret.txt").write_text(f"{secret}\n")
    command, settings = AGENTS[agent](home, work)
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        env={**ALONE, "HOME": str(home), **settings},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    print(done.stdout, done.stderr)

    assert done.returncode == 0
    assert done.stdout.rstrip().endswith(f"The file says {secret}.")
