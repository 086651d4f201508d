"""Flags of habit: of other servers, of the router on a stack, in other spellings."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.__main__ import COMMANDS, main
from tandem.cli.serve.overrides import ROLES, Overrides, of_router, sections_for, take_roles
from tandem.cli.serve.router import prepared_config, router_sections
from tandem.cli.serve.stack import UpConfig, plan
from tandem.cli.settings import command as other_flags
from tandem.cli.settings.command import UsageError, read_command_line, translated
from tandem.cli.settings.flags import Section, flag_of, whole_number
from tandem.cli.settings.secret_flags import api_key_of, take_secrets
from tandem.cli.settings.worker_settings import worker_sections
from tandem.engine.config import ModelConfig
from tandem.engine.config.cache import CacheConfig
from tandem.engine.config.scheduler import SchedulerConfig
from tandem.hub.folder import ModelFiles
from tandem.llm.other_servers import NEEDLESS, REFUSED, SAME, SWITCHES
from tandem.protocol.errors import InvalidParameter
from tandem.router.config import RouterConfig

STACK = [Section("Stack", UpConfig), *sections_for(ROLES)]
OURS = {
    each.name
    for section in [*STACK, *router_sections(), *worker_sections()]
    for each in section.flags()
}


def read(words: str) -> dict[type, dict[str, object]]:
    rest, _ = take_roles(of_router("serve", shlex.split(words), STACK), ROLES)
    return read_command_line("serve", "", STACK, rest, {})


@pytest.fixture(autouse=True)
def nothing_was_printed(monkeypatch: pytest.MonkeyPatch):
    """Each test sees the lines that it causes."""
    monkeypatch.setattr(other_flags, "_printed", set())


def test_the_table_says_nothing_of_our_own_flags():
    """What is ours is not another's; what is the same has a flag of ours."""
    for table in (SAME, NEEDLESS, REFUSED):
        assert not table.keys() & OURS
    assert not NEEDLESS.keys() & REFUSED.keys()
    assert {name.removeprefix("no_") for name in SAME.values()} <= OURS
    assert NEEDLESS.keys() | SAME.keys() >= SWITCHES


@pytest.mark.parametrize("name", sorted(NEEDLESS))
def test_what_needs_nothing_is_accepted_with_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
):
    """With its value, if it has one, in either form; what follows it is read as before."""
    flag = flag_of(name)
    forms = [[flag]] if name in SWITCHES else [[flag, "1"], [f"{flag}=1"]]
    if name in SWITCHES:
        forms += [[flag, "true"], ["--no-" + flag[2:]]]
    for form in forms:
        given = read(shlex.join(["m", *form, "--port", "9", "--max-num-seqs", "3"]))
        assert given[UpConfig] == {"model": "m", "port": 9}
        assert given[SchedulerConfig] == {"max_num_seqs": 3}
    lines = capsys.readouterr().err.splitlines()
    assert all("has no effect: " in line for line in lines)
    assert len(lines) == (2 if name in SWITCHES else 1)  # --no-flag has one of its own


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_done_is_refused_by_name(name: str):
    flag = flag_of(name) if len(name) > 1 else f"-{name}"
    for form in ([flag, "x"], [f"{flag}=x"]):
        with pytest.raises(UsageError, match=f"(?<!-){flag} cannot be done: "):
            read(shlex.join(["m", *form]))


def test_names_of_others_are_ours():
    """Short and long, of both servers."""
    given = read("--model-path m -tp 1 --context-length 4K --mem-fraction-static 0.5")
    assert given[UpConfig]["model"] == "m"
    assert given[ModelConfig] == {"max_model_len": 4_096}
    assert given[CacheConfig] == {"gpu_memory_utilization": 0.5}
    assert read("m -tp=1") == read("m --tp 1") == read("m --tensor-parallel-size 1")
    assert read("m --disable-radix-cache")[CacheConfig] == {"enable_prefix_caching": False}
    assert read("m --dtype half")[ModelConfig] == {"dtype": "float16"}
    assert ModelConfig(model="m", dtype="float").dtype == "float32"


def test_two_ranks_in_one_process_are_refused_by_name(capsys: pytest.CaptureFixture[str]):
    """Before the model is looked at."""
    flags = ["-tp", "2", "--distributed-executor-backend", "uni"]
    assert main(["serve", "/nonexistent", *flags]) == 2
    assert "tensor_parallel_size: 2 is not allowed; 1 with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1_500),
        ("2M", 2 << 20),
        ("4GiB", 4 << 30),
        ("4Gi", 4 << 30),
        ("1_000", 1_000),
        ("8", 8),
        ("-1", -1),
    ],
)
def test_sizes_have_letters(text: str, number: int):
    """Small ones are powers of a thousand, capitals of 1,024, as in vLLM."""
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["k", "32 k", "1.5", "1.0001k", "32kk", "1e3", "9" * 30 + "k", ""])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011
        whole_number(text)


def test_several_names_are_served():
    """As others take them, and by the flag again; the worker has the first."""
    given = read("m --served-model-name a b --port 9")
    assert given[UpConfig]["served_model_name"] == ("a", "b")
    again = read("m --served-model-name a --served-model-name b --port 9")
    assert again == given
    *workers, router = plan(UpConfig(), "m", ("a", "b"), range(1, 9), [])
    names = [
        router.arguments[at + 1]
        for at, word in enumerate(router.arguments)
        if word == "--served-model-name"
    ]
    assert names == ["a", "b"]
    assert all("b" not in child.arguments for child in workers)


def test_a_model_is_not_taken_for_a_name():
    """A word behind two names may be either."""
    with pytest.raises(UsageError, match="may hold the model; give it first"):
        read("--served-model-name a Qwen/Qwen3-8B")


def test_flags_of_the_router_are_taken_without_its_name():
    """By the commands that run one; a flag of both is the stack's."""
    argv = ["m", "--tool-call-parser", "hermes", "--api-key=k", "--no-enable-admin-api"]
    words = of_router("serve", [*argv, "--log-level", "debug"], STACK)
    rest, roles = take_roles(words, ROLES)
    assert rest == ["m", "--log-level", "debug"]
    assert roles["router"] == [
        "--tool-call-parser",
        "hermes",
        "--api-key=k",
        "--no-enable-admin-api",
    ]


def test_keys_are_in_no_process_list():
    """A stack's processes get theirs by the environment, whatever is in them."""
    words = ["--api-key", "a,b", "--admin-api-key=c", "--api-key", "d", "--port", "3"]
    rest, environment = take_secrets(words)
    assert rest == ["--port", "3"]
    given = read_command_line("router", "", router_sections(), rest, environment)
    assert given[RouterConfig]["api_key"] == ("a,b", "d")
    assert given[RouterConfig]["admin_api_key"] == ("c",)
    secret = ["--kv-secret", "s" * 40]
    keys = Overrides(flags={"router": ["--api-key", "k1"], "prefill": secret, "decode": secret})
    for child in plan(UpConfig(), "m", ("m",), range(1, 9), [], keys):
        assert not {"k1", "s" * 40} & set(child.arguments)
    assert child.environment["TANDEM_API_KEY"] == '["k1"]'


def test_a_server_starts_again_without_the_key_that_it_was_given(tmp_path: Path):
    """What the first process finds in its environment, and does not in its arguments."""
    probe = tmp_path / "sitecustomize.py"
    probe.write_text(
        "import os, sys\n"
        "words = open('/proc/self/cmdline').read()\n"
        "if 'TANDEM_API_KEY' in os.environ and 'serve' in words:\n"
        "    print('ENV', os.environ['TANDEM_API_KEY'], 'hidden', 'sekret' not in words)\n"
        "    os._exit(7)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tandem.cli", "serve", "m", "--api-key", "sekret"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if sys.platform == "linux":
        assert (done.returncode, done.stdout) == (7, 'ENV ["sekret"] hidden True\n')


def test_clients_take_their_key_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_API_KEY", "k1,k2")
    assert api_key_of(None) == "k1"
    monkeypatch.setenv("TANDEM_API_KEY", '["k,1", "k2"]')
    assert api_key_of(None) == "k,1"
    assert api_key_of("other") == "other"
    monkeypatch.delenv("TANDEM_API_KEY")
    assert api_key_of(None) is None


def test_a_router_takes_what_others_take(smollm2: Path, tmp_path: Path):
    """A package, a GGUF file, a hub id: its tokenizer is prepared; a folder is taken as it is."""
    config = prepared_config({RouterConfig: {"model": "smollm2"}, ModelFiles: {}})
    assert (Path(config.model) / "tokenizer.json").is_file()
    assert config.served_model_name == ("smollm2",)
    given = {RouterConfig: {"model": str(smollm2)}, ModelFiles: {}}
    assert prepared_config(given).model == str(smollm2)
    changed = prepared_config({**given, ModelFiles: {"chat_template": "{{ 'mine' }}"}})
    assert (Path(changed.model) / "chat_template.jinja").read_text() == "{{ 'mine' }}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_wrong_flag_names_itself(command: str, capsys: pytest.CaptureFixture[str]):
    sub = ["throughput"] if command == "bench" else ["id"] if command == "explain" else []
    sub = ["-i", "x", "-o", "y"] if command == "run-batch" else sub
    assert main([command, *sub, "--modell", "x"]) == 2
    assert "--modell" in capsys.readouterr().err.splitlines()[0]


def test_words_that_are_no_flags_pass():
    """Values that look like flags of others are not touched where they are values."""
    assert translated(["-x", "tp", "--port", "9", "m"], {"--port"}, "serve") == [
        "-x",
        "tp",
        "--port",
        "9",
        "m",
    ]
    with pytest.raises(InvalidParameter):
        ModelFiles(hf_overrides="{")
