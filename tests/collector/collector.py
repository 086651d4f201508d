"""An OpenTelemetry collector that runs: what comes in by OTLP is a line of a file each time."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from tests.waiting import wait_for

from tandem.cli.serve.listening import LOOPBACK, free_ports

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parents[1] / ".tools" / "collector" / "collector"
BUILD_SECONDS = 1800
START_SECONDS, STOP_SECONDS = 60.0, 20.0


def build() -> Path:
    """The program; go.mod names the collector's parts, which the first build downloads."""
    newest = max((HERE / name).stat().st_mtime for name in ("main.go", "go.mod", "go.sum"))
    if not PROGRAM.is_file() or PROGRAM.stat().st_mtime < newest:
        print("building an OpenTelemetry collector", flush=True)
        command = ["go", "build", "-trimpath", "-o", str(PROGRAM), "."]
        alone = {**os.environ, "CGO_ENABLED": "0"}  # it runs in an image that has nothing else
        subprocess.run(command, check=True, cwd=HERE, env=alone, timeout=BUILD_SECONDS)
    return PROGRAM


class Collector:
    def __init__(self, grpc_port: int, http_port: int, file: Path) -> None:
        self.grpc_url = f"http://{LOOPBACK}:{grpc_port}"
        self.http_url = f"http://{LOOPBACK}:{http_port}"
        self.file = file
        """Spans as OTLP's JSON, a message a line."""

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Collector]:
        """While the block runs; its log is ``collector.log`` in ``folder``."""
        grpc_port, http_port = free_ports(2)
        found = cls(grpc_port, http_port, folder / "traces.json")
        config = folder / "collector.yaml"
        receive = {"grpc": f"{LOOPBACK}:{grpc_port}", "http": f"{LOOPBACK}:{http_port}"}
        config.write_text(yaml.safe_dump(configuration(receive, found.file)))
        command = [str(build()), f"--config=file:{config}"]
        with (folder / "collector.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                wait_for(
                    lambda: all(map(_listens, (grpc_port, http_port))),
                    START_SECONDS,
                    seen=lambda: (folder / "collector.log").read_text()[-2000:],
                )
                yield found
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                process.kill()
                process.wait()


def configuration(receive: Mapping[str, str], file: Path) -> dict[str, object]:
    """Of a collector that takes OTLP at these addresses, by protocol (grpc, http), and writes it to
    ``file``."""
    protocols = {protocol: {"endpoint": address} for protocol, address in receive.items()}
    return {
        "receivers": {"otlp": {"protocols": protocols}},
        "exporters": {"file": {"path": str(file), "flush_interval": "100ms"}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "warn"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["file"]}},
        },
    }


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
        return True
    return False
