"""`tandem up` before anything runs: what is wrong is said in a line, at once."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from tests.cli.answering import Answer, served

from tandem.base.listening import HEADER_CHILD_TOKEN
from tandem.base.settings import settings_of
from tandem.cli.__main__ import main
from tandem.cli.serve import up
from tandem.cli.serve.child_flags import check_worker
from tandem.cli.serve.children import Child
from tandem.cli.serve.listening import LOOPBACK, free_ports
from tandem.cli.serve.overrides import (
    FILLED,
    ROLES,
    Overrides,
    environment_of,
    sections_for,
    take_roles,
)
from tandem.cli.serve.stack import UpConfig, plan
from tandem.cli.serve.up import Supervisor
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.worker_settings import worker_sections
from tandem.router.config import RouterConfig
from tandem.worker.server_config import ServerConfig

NOWHERE = "/nonexistent/model"
"""Would be complained about, were it looked at."""


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with, at exit status 2."""
    assert main(shlex.split(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    return said.err


def test_a_taken_port_is_found_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]):
    """No minutes of conversion, and no greeting with somebody else's server."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        said = refused(f"up --model {NOWHERE} --port {port}", capsys)
    assert f"port: {port} is not allowed" in said
    assert "another program" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 0", "port: 0 is not allowed; an integer, 1 to 65535"),
        ("--port 70000", "port: 70000 is not allowed"),
        ("--port abc", "--port: 'abc' is not allowed; an integer"),
        ("--port", "--port: a value has to follow"),
        ("--host nonsense.invalid", "host: 'nonsense.invalid'"),
        ("--prefill -1", "prefill: -1 is not allowed; an integer, 0 to 64"),
        ("--log-level loud", "one of debug, info, warning, error"),
        ("--ready-seconds 9", "--ready-seconds is not a flag of `tandem up`"),
        ("--worker-flags x", "--worker-flags is not a flag of `tandem up`"),
        ("--modle x", "--modle is not a flag of `tandem up`; --model is"),
        ("surplus", f"'surplus' is not allowed here; the model is '{NOWHERE}'"),
        ("--max-num-seqs x", "--max-num-seqs: 'x' is not allowed; an integer"),
        ("--max-num-seqs 0", "prefill workers: max_num_seqs: 0 is not allowed"),
        ("--max-num-sek 3", "--max-num-sek is not a flag of `tandem up`; --max-num-seqs is"),
        ("--max-num-seq 3", "--max-num-seq is not a flag of `tandem up`; --max-num-seqs is"),
        ("--decode.max-logprob 3", "--max-logprob is not a flag of `tandem decode`"),
        ("--kv-control-port 3", "--kv-control-port is not a flag of `tandem up`"),
        (
            "--decode.max-num-sek 3",
            "decode workers: --max-num-sek is not a flag of `tandem decode`",
        ),
        ("--prefill.max-num-seqs 0", "prefill workers: max_num_seqs: 0 is not allowed"),
        ("--router.grpc-port=-1", "flags of the router: grpc_port: -1"),
        ("--decode.enforce-eager --decode.max-num-seqs 0", "decode workers: max_num_seqs: 0"),
        ("--oven.heat 3", "--oven.heat is not a flag of `tandem up`"),
        ("--enforce-eagr", "--enforce-eagr is not a flag of `tandem up`; --enforce-eager is"),
        ("--decode.max-num-seqs=-4", "decode workers: max_num_seqs: -4"),
        ("--prefill.kv-slots 0", "prefill workers: kv_slots: 0"),
        ("--router.api-key=", "api-key: [''] is not allowed"),
        ("--prefill.host 0.0.0.0", "--allow-plaintext"),
        ("--decode.probe-port 19101", "decode workers: --probe-port is not allowed here"),
        ("--prefill.kv-data-port=7", "prefill workers: --kv-data-port is not allowed"),
        ("--prefill.port 19100", "prefill workers: --port is not allowed here"),
        ("--decode.model other", "decode workers: --model is not allowed here; give --model to"),
        ("--router.port 9000", "the router: --port is not allowed here; give --port to the stack"),
        ("--router.host ::", "the router: --host is not allowed here"),
        ("--decode.host 192.0.2.1 --allow-plaintext", "decode workers: host: '192.0.2.1'"),
    ],
)
def test_a_wrong_word_is_named_before_the_model_is_looked_at(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """Field, value and what is allowed, without the usage before them."""
    (port,) = free_ports(1)
    own = "" if "--port" in words else f"--port {port}"
    assert said in refused(f"up --model {NOWHERE} {own} {words}", capsys)


def test_the_model_may_stand_without_its_flag(capsys: pytest.CaptureFixture[str]):
    """Before, between and after flags, as with other servers; one that is not there is named."""
    for words in (
        f"up {NOWHERE} --prefill 0",
        f"serve --max-num-seqs 4 {NOWHERE} --log-level info",
    ):
        (port,) = free_ports(1)
        main([*words.split(), "--port", str(port)])
        assert NOWHERE in capsys.readouterr().err


def test_flags_of_workers_reach_every_worker_and_those_of_a_role_it_alone():
    """By the environment, where a secret of a file stays unseen; a role's own flag wins."""
    words = ["--max-num-seqs", "8", "--no-enable-prefix-caching", "--prefill.max-num-seqs", "4"]
    words += ["--router.bogus", "--decode.enforce-eager", "--decode.device=cpu", "--prefill", "1"]
    rest, roles = take_roles(words, ROLES)
    given = parse("up", "", [Section("Stack", UpConfig), *sections_for(ROLES)], rest)
    overrides = Overrides(environment=environment_of(given, UpConfig), flags=roles)
    children = plan(UpConfig(), "model", ("name",), range(1, 9), [], overrides)

    told = {child.name: child for child in children}
    shared = {"TANDEM_MAX_NUM_SEQS": "8", "TANDEM_ENABLE_PREFIX_CACHING": "false"}
    assert told["prefill-0"].environment == told["decode-0"].environment == shared
    assert told["prefill-0"].arguments[-2:] == ["--max-num-seqs", "4"]
    assert told["decode-0"].arguments[-2:] == ["--enforce-eager", "--device=cpu"]
    assert not shared.keys() & told["router"].environment.keys()
    flags = told["prefill-0"].arguments[1:]
    _, engine = check_worker("prefill", flags, told["prefill-0"].environment)
    assert (engine["max_num_seqs"], engine["enable_prefix_caching"]) == (4, False)


@pytest.mark.parametrize(
    "flag",
    ["--decode.no-enforce-eager", "--router.allow-plaintext"],
)
def test_no_switch_of_a_role_takes_the_model_with_it(flag: str):
    """Each role's own switches are known as such."""
    rest, roles = take_roles([flag, "MODEL"], ROLES)
    role, _, name = flag[2:].partition(".")
    assert (rest, roles[role]) == (["MODEL"], [f"--{name}"])


def test_every_flag_of_a_worker_is_a_flag_of_the_stack():
    """But for what the stack fills in by itself, and says so."""
    taken = {each.name for section in sections_for(ROLES) for each in section.flags()}
    wanted = {each.name for section in worker_sections() for each in section.flags()}
    assert wanted - taken == FILLED
    assert not taken & {each.name for each in settings_of(UpConfig)}


def test_the_end_waits_as_long_as_router_and_workers_drain():
    """The longest drain of the workers counts, and what is given to the router."""
    graces, _ = Supervisor(UpConfig()).check_flags()
    assert (graces.router, graces.workers) == (
        RouterConfig().drain_timeout,
        ServerConfig().drain_seconds,
    )
    flags = {"router": ["--drain-timeout", "50"], "prefill": ["--drain-seconds", "70"]}
    graces, _ = Supervisor(UpConfig(), Overrides(flags=flags)).check_flags()
    assert (graces.router, graces.workers) == (50.0, 70.0)


def bounds_of_steps(words: str) -> dict[str, str | None]:
    """The value of ``--max-itl-ms`` that each process of a stack is started with."""
    rest, roles = take_roles(shlex.split(words), ROLES)
    given = parse("up", "", [Section("Stack", UpConfig), *sections_for(ROLES)], rest)
    overrides = Overrides(environment=environment_of(given, UpConfig), flags=roles)
    supervisor = Supervisor(UpConfig(**given[UpConfig]), overrides)
    supervisor.check_flags()
    children = plan(supervisor.config, "model", ("name",), range(1, 9), [], supervisor.overrides)
    told: dict[str, str | None] = {}
    for child in children:
        here = dict(pairwise(child.arguments)).get("--max-itl-ms")
        told[child.arguments[0]] = here or child.environment.get("TANDEM_MAX_ITL_MS")
    return told


@pytest.mark.parametrize(
    ("words", "prefill", "decode"),
    [
        ("", None, None),
        ("--device cuda", "21", "21"),
        ("--device cuda --router.strict-handoff", None, None),
        ("--device cuda --router.target-itl-ms 50", "42", "42"),
        ("--device cuda --max-itl-ms 9", "9.0", "9.0"),
        ("--device cuda --decode.max-itl-ms 9", "21", "9"),
        ("--device cuda --prefill 0", None, None),
    ],
)
def test_gpu_workers_of_a_pair_get_a_bound_of_steps(
    words: str, prefill: str | None, decode: str | None
):
    """It is a little below the router's target, for a role without a bound of its own."""
    told = bounds_of_steps(words)
    assert (told.get("prefill"), told["decode"], told["router"]) == (prefill, decode, None)


def test_settings_of_the_environment_count_for_the_bound(monkeypatch: pytest.MonkeyPatch):
    """Whichever way the router and the workers are configured."""
    monkeypatch.setenv("TANDEM_MAX_ITL_MS", "12")
    assert bounds_of_steps("--device cuda")["decode"] == "12.0"
    monkeypatch.delenv("TANDEM_MAX_ITL_MS")
    monkeypatch.setenv("TANDEM_STRICT_HANDOFF", "true")
    assert bounds_of_steps("--device cuda")["decode"] is None


def test_an_empty_key_from_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """TANDEM_API_KEY= is a key that got lost, not a wish for none."""
    monkeypatch.setenv("TANDEM_API_KEY", "")
    assert "TANDEM_API_KEY: '' is not allowed" in refused("router --model x", capsys)


@contextmanager
def stranger(token: str | None) -> Iterator[str]:
    """A server that answers 200 to everything; the URL of its /ready."""

    class Said(Answer):
        def do_GET(self) -> None:
            self.send_response(200)
            if token is not None:
                self.send_header(HEADER_CHILD_TOKEN, token)
            self.end_headers()

    with served(Said) as root:
        yield f"{root}/ready"


@pytest.mark.parametrize("token", [None, "of another stack"])
def test_somebody_elses_readiness_is_not_ours(token: str | None):
    """A process that still starts is not ready because another server answers on its port."""
    with stranger(token) as url:
        child = Child("router", ["--version"], url)
        child.start(sys.stderr)
        try:
            assert not child.check_ready()
        finally:
            child.kill()


def test_a_process_that_has_ended_is_not_ready():
    """Whoever answers now, it is not the one that was started."""
    with stranger("ours") as url:
        child = Child("router", ["--version"], url, token="ours")
        child.start(sys.stderr)
        assert child.process is not None
        child.process.wait(30)
        assert not child.check_ready()
        child.kill()


def test_workers_with_gpus_meet_in_a_folder_of_this_user(monkeypatch):
    """Then KV is copied from GPU to GPU; a folder that is named stands, and CPUs get none."""
    supervisor = Supervisor(UpConfig(model="m", prefill=1, decode=1))

    def folders() -> set[str | None]:
        children = supervisor._plan("p", ("m",))
        return {each.environment.get(up.ENV_FOLDER) for each in children}

    monkeypatch.setattr(up, "visible_gpus", lambda: ["0", "1"])
    with tempfile.TemporaryDirectory(prefix="kv-") as place:  # a socket's path is bounded
        monkeypatch.setattr("tempfile.tempdir", place)
        monkeypatch.delenv(up.ENV_FOLDER, raising=False)
        assert folders() == {f"{place}/tandem-kv-{os.getuid()}"}
        monkeypatch.setenv(up.ENV_FOLDER, "/named")
        assert folders() == {None}
        monkeypatch.delenv(up.ENV_FOLDER)
        monkeypatch.setattr(up, "visible_gpus", list)
        assert folders() == {None}


def test_a_folder_that_is_somebody_elses_is_said_and_not_used(monkeypatch, capsys):
    """KV goes by the next way then, and the terminal says why."""
    monkeypatch.delenv(up.ENV_FOLDER, raising=False)
    with tempfile.TemporaryDirectory(prefix="kv-") as place:
        monkeypatch.setattr("tempfile.tempdir", place)
        os.mkdir(f"{place}/tandem-kv-{os.getuid()}", 0o755)
        assert up.meeting_folder() == {}
    assert "KV is not copied from GPU to GPU" in capsys.readouterr().out
