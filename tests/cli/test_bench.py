"""`tandem bench serve` against an app over scripted workers, and its arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.cli import bench
from tandem.cli.bench.client import Record
from tandem.cli.bench.load import LoadConfig, arrivals, asks
from tandem.cli.bench.serve import parse_goodput, show, summarize
from tandem.protocol.errors import InvalidParameter, TandemError

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


@pytest.mark.nightly
def test_a_run_is_measured_shown_and_saved(
    serve: Serve, decode: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table on standard output, a JSON with every time."""
    served = serve(decode(step=0.005))
    result = tmp_path / "r.json"
    status = bench.run(
        [
            *("serve", "--base-url", served.url, "--num-prompts", "6", "--max-concurrency", "3"),
            *("--random-input-len", "20", "--random-output-len", "5"),
            *("--goodput", "ttft:60000", "--result", str(result)),
        ]
    )

    assert status == 0
    saved = json.loads(result.read_text())
    assert (saved["completed"], saved["failed"]) == (6, 0)
    assert saved["total_input_tokens"] == 120
    assert saved["total_output_tokens"] == 30
    assert 1 <= saved["max_concurrency_seen"] <= 3
    assert saved["share_within_bounds"] == 1
    assert saved["median_itl_ms"] <= saved["p90_itl_ms"] <= saved["p99_itl_ms"]
    assert saved["median_ttft_ms"] <= saved["median_e2el_ms"]
    assert all(len(each["times"]) == 5 for each in saved["requests"])
    assert "Time to first token" in capsys.readouterr().out


def test_failed_requests_are_counted_by_reason(
    serve: Serve, decode: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and what the server said."""
    served = serve(decode())
    status = bench.run(
        [
            *("serve", "--base-url", served.url, "--num-prompts", "2", "--num-warmups", "0"),
            *("--random-input-len", "20", "--random-output-len", "1000000"),
        ]
    )

    assert status == 1
    out = capsys.readouterr().out
    assert "2 x HTTP 400" in out
    assert "max_tokens" in out


def test_a_servers_words_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup, which would end the run; controls are escapes."""
    show({"errors": {"HTTP 400: near [/INST] [request 12ab] \x1b[2J": 3}})
    assert "3 x HTTP 400: near [/INST] [request 12ab] \\x1b[2J" in capsys.readouterr().out


@pytest.mark.full
def test_a_result_is_saved_before_it_is_shown(
    serve: Serve, decode: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that is gone takes no hour's run with it."""
    result = tmp_path / "r.json"

    def gone(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("tandem.cli.bench.serve.show", gone)
    words = ["--base-url", serve(decode()).url, "--num-prompts", "1", "--result", str(result)]
    words += ["--random-input-len", "20", "--random-output-len", "1"]
    with pytest.raises(BrokenPipeError):
        bench.run(["serve", *words])
    assert json.loads(result.read_text())["completed"] == 1


@pytest.mark.full
def test_processes_share_a_load(serve: Serve, decode: Make, tmp_path: Path) -> None:
    """All requests are sent once, on one clock, with as many at once as one process would have."""
    served = serve(decode(step=0.005))
    result = tmp_path / "r.json"
    status = bench.run(
        [
            *("serve", "--base-url", served.url, "--num-prompts", "7", "--max-concurrency", "3"),
            *("--random-input-len", "20", "--random-output-len", "5"),
            *("--client-processes", "2", "--result", str(result)),
        ]
    )

    assert status == 0
    saved = json.loads(result.read_text())
    assert (saved["completed"], saved["total_output_tokens"]) == (7, 35)
    assert 1 <= saved["max_concurrency_seen"] <= 3
    assert all(0 <= each["sent_at"] < saved["duration"] for each in saved["requests"])


def test_an_open_loop_keeps_its_rate() -> None:
    """Whatever the gaps, the run as a whole."""
    load = LoadConfig(num_prompts=400, request_rate=20.0)
    times = [at for at in arrivals(load, np.random.default_rng(1)) if at is not None]
    assert len(times) == 400
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20.0, rel=0.05)


def test_a_seed_gives_one_load() -> None:
    load = LoadConfig(num_prompts=6, random_input_len=10)
    made = asks(load)
    assert made == asks(load)
    assert all(len(each.prompt) == 10 for each in made)
    assert made[0].prompt != made[1].prompt


def test_a_trace_gives_lengths_and_times(tmp_path: Path) -> None:
    """Lengths are cut to what the model holds."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    load = LoadConfig(dataset_path=str(path), max_model_len=400)
    first, second = asks(load)

    assert (len(first.prompt), first.max_tokens, first.at) == (356, 44, 0.0)
    assert (len(second.prompt), second.max_tokens) == (291, 109)
    assert second.at == pytest.approx(50.995169 - 46.68059)


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(path: Path, rows: str) -> LoadConfig:
    """A load of the file's, which holds ``rows``."""
    path.write_bytes(rows.encode("latin-1"))
    return LoadConfig(dataset_path=str(path))


def test_times_of_a_trace_may_have_a_zone_and_no_fraction(tmp_path: Path) -> None:
    """As Azure's of 2024: Python leaves a fraction of zero out."""
    zoned = "2024-05-10 00:00:00.009930+00:00,3,4\n2024-05-10 00:00:01+00:00,5,6\n"
    made = asks(trace(tmp_path / "trace.csv", f"{TRACE}{zoned}2024-05-10 00:00:02,7,8\n"))
    assert [each.at for each in made] == pytest.approx([0.0, 0.99007, 1.99007])
    assert [(len(each.prompt), each.max_tokens) for each in made] == [(3, 4), (5, 6), (7, 8)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,b\n1,2\n", "columns TIMESTAMP"),
        (TRACE + "2024-05-10,3,4\n2024-05-10,,4\n", "line 3: ContextTokens: '' is"),
        (TRACE + "2024-05-10,3\n", "line 2: GeneratedTokens: None is"),
        (TRACE + "2024-05-10,3,4.5\n", "line 2: GeneratedTokens: '4.5' is"),
        (TRACE + "yesterday,3,4\n", "line 2: TIMESTAMP: 'yesterday' is"),
        (TRACE + "2024-05-10,3,\xe9\n", "a CSV in UTF-8"),
    ],
)
def test_a_wrong_trace_is_one_line(rows: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(InvalidParameter) as raised:
        asks(trace(path, rows))
    assert words in str(raised.value)
    assert str(path) in str(raised.value)


def test_figures_are_those_of_the_records() -> None:
    """Time per token leaves out the first; one beyond a bound is no good request."""
    one = Record(10, 0.0, [0.1, 0.2, 0.4], 3)
    two = Record(10, 1.0, [1.5, 1.6], 2)
    broken = Record(10, 0.0, error="no")
    result = summarize([one, two, broken], 2.0, goodput=parse_goodput(["ttft:200"]))

    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["output_throughput"] == pytest.approx(2.5)
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["p99_tpot_ms"] == pytest.approx(149.5)
    assert result["median_itl_ms"] == pytest.approx(100)
    assert result["request_goodput"] == pytest.approx(0.5)
    assert result["errors"] == {"no": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--goodput", "speed:1"],
        ["--num-prompts", "0"],
        ["--dataset-path", "/nowhere"],
    ],
)
def test_wrong_settings_are_named(wrong: list[str]) -> None:
    with pytest.raises(InvalidParameter, match=wrong[0].lstrip("-").split("-")[0]):
        bench.run(["serve", "--base-url", "http://127.0.0.1:9", "--model", "m", *wrong])


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("serve", "result"),
        *(("throughput", "output-json"), ("kernels", "output-json")),
    ],
)
def test_a_result_without_a_place_is_refused_before_it_is_measured(
    kind: str, flag: str, tmp_path: Path
) -> None:
    for place in (tmp_path / "none" / "r.json", tmp_path):
        with pytest.raises(InvalidParameter, match="a file in a folder that is there"):
            bench.run([kind, f"--{flag}", str(place)])


def test_kinds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["--help"]) == 0
    assert "throughput" in capsys.readouterr().out
    assert bench.run(["nothing"]) == bench.run(["startup"]) == bench.run(["latency"]) == 2


SMALL = {
    "dtype": "float32",
    "batch-sizes": "1,3",
    "context-len": "40",
    "hidden-size": "64",
    "intermediate-size": "96",
    "num-heads": "4",
    "num-kv-heads": "2",
    "head-dim": "16",
    "vocab-size": "500",
    "block-size": "16",
}


def test_kernels_are_held_to_their_rooflines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every op of a layer at each number of rows, its time and what it could take, as JSON."""
    saved = tmp_path / "kernels.json"
    asked = {"device": "cpu", "output-json": str(saved), **SMALL}
    assert bench.run(["kernels", *(f"--{name}={value}" for name, value in asked.items())]) == 0
    result = json.loads(saved.read_text())
    names = [row["kernel"] for row in result["kernels"]]
    assert {"qkv, 1 rows", "head, 3 rows", "decode attention, 3 x 40"} <= set(names)
    assert names.count("prefill attention, 40") == 1
    assert all(row["us"] > 0 and row["roofline_us"] > 0 for row in result["kernels"])
    assert min(result["read_gb_per_s"], result["product_tflop_per_s"]) > 0
    assert "rotary_kv" in capsys.readouterr().out


def test_kernels_are_measured_by_flags_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What servers are told here is not of these shapes, which the JSON says."""
    monkeypatch.setenv("TANDEM_BATCH_SIZES", "0")
    monkeypatch.setenv("TANDEM_DTYPE", "auto")
    monkeypatch.setenv("TANDEM_CONFIG", str(tmp_path / "none.yaml"))
    saved = tmp_path / "kernels.json"
    asked = {"device": "cpu", "output-json": str(saved), "only": "qkv", **SMALL}
    assert bench.run(["kernels", *(f"--{name}={value}" for name, value in asked.items())]) == 0
    shapes = json.loads(saved.read_text())["shapes"]
    assert (shapes["block_size"], shapes["batch_sizes"]) == (16, SMALL["batch-sizes"])
    assert shapes["dtype"] == SMALL.get("dtype", "bfloat16")
    assert not {"device", "output_json"} & shapes.keys()
    with pytest.raises(TandemError, match="--config is not a flag"):
        bench.run(["kernels", "--config", "x"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_kernels_without_a_gpu_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the CPU's own are asked for; shapes that do not fit are named as well."""
    assert bench.run(["kernels"]) == 2
    assert "device" in capsys.readouterr().err
    with pytest.raises(InvalidParameter, match="num_heads"):
        bench.run(["kernels", "--num-heads", "5", "--num-kv-heads", "2"])
    with pytest.raises(InvalidParameter, match="batch_sizes"):
        bench.run(["kernels", "--batch-sizes", "1,none"])


@pytest.mark.full
def test_an_engine_in_this_process_is_measured(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """throughput runs a real model and saves what it prints."""
    throughput = tmp_path / "t.json"
    model = ["--model", str(smollm2), "--device", "cpu", "--dtype", "float32"]
    model += ["--num-gpu-blocks-override", "24"]
    load = ["--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "4"]
    load += ["--max-model-len", "256"]
    assert bench.run(["throughput", *model, *load, "--output-json", str(throughput)]) == 0

    saved = json.loads(throughput.read_text())
    assert (saved["requests"], saved["input_tokens"], saved["output_tokens"]) == (3, 60, 12)
    assert "output_tokens_per_s" in capsys.readouterr().out
