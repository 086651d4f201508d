"""Measure a tenant's time to the first token while another tenant takes all that it is given.

Starts `tandem up` (SmolLM2 on the CPU) with two API keys, measures a victim's time to the first
token alone and next to each of ``hogs``, and prints a table. The victim's prompt has 9,000
characters, so that it needs a thread of the router, and is cached, so that it needs little of a
worker.

    .venv/bin/python bench/router/fairness.py --only tokenize uploads

The hog's own process, the router and the workers share the cores of one machine: on few cores the
victim also waits for the hog's client.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import httpx
from hogs import NAMES, be

from tandem.cli.serve.listening import free_ports

READY_SECONDS = 300.0
VICTIM, HOG = "key-of-the-victim", "key-of-the-hog"
PROMPT = "The quick brown fox. " * 430


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds to the first token, and the answers that were none."""

    times: list[float]
    failures: int
    slowest: str = ""
    """Where the time of the slowest one went, by the router's timeline."""

    def text(self) -> str:
        """Median and most, in milliseconds."""
        if not self.times:
            return f"{'-':>7} {'-':>7}   failed {self.failures}"
        median, most = statistics.median(self.times) * 1000, max(self.times) * 1000
        return f"{median:7.0f} {most:7.0f}   failed {self.failures}"


def ask(client: httpx.Client, body: dict[str, object]) -> tuple[float | None, str]:
    """Seconds to the first token, None for a refusal; and the timeline of the call."""
    began, taken, timeline = time.perf_counter(), None, ""
    headers = {"x-tandem-timeline": "1"}
    content = {**body, "stream": True}
    try:
        with client.stream("POST", "/v1/completions", json=content, headers=headers) as stream:
            for line in stream.iter_lines():
                if taken is None and line.startswith("data: {") and '"choices"' in line:
                    taken = time.perf_counter() - began
                if line.startswith(": timeline "):
                    timeline = line.removeprefix(": timeline ")
    except httpx.HTTPError:
        pass
    return taken, timeline


def parts_of(timeline: str) -> str:
    """The longest parts of a call, in milliseconds."""
    if not timeline:
        return ""
    parts = sorted(json.loads(timeline)["parts"], key=lambda each: -each[3])[:6]
    return ", ".join(f"{owner} {name} {ms:.0f}" for owner, name, _, ms in parts)


def measure(client: httpx.Client, count: int) -> Row:
    """Ask so often, one after the other."""
    times: list[float] = []
    failures, slowest = 0, ""
    for _ in range(count):
        taken, timeline = ask(client, {"prompt": PROMPT, "max_tokens": 1, "temperature": 0})
        if taken is None:
            failures += 1
        else:
            slowest = timeline if taken >= max(times, default=0.0) else slowest
            times.append(taken)
        time.sleep(0.3)
    return Row(times, failures, parts_of(slowest))


def cpu_pool(name: str, url: str, rpc_port: int, client: httpx.Client, count: int) -> Row:
    """Measure while a hog runs."""
    hog = multiprocessing.Process(target=be, args=(name, url, rpc_port, HOG), daemon=True)
    hog.start()
    try:
        time.sleep(5.0)
        return measure(client, count)
    finally:
        hog.kill()
        hog.join()
        time.sleep(3.0)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the stack serves. Raises SystemExit if it ends or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("the stack did not become ready")


def store(client: httpx.Client) -> str:
    """The id of a stored response."""
    answer = client.post("/v1/responses", json={"input": "Keep this", "max_output_tokens": 1})
    answer.raise_for_status()
    return str(answer.json()["id"])


def main() -> int:
    """Print the table; 1 if a stored response of the victim was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--count", type=int, default=10, help="times that the victim asks")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--timeline", action="store_true", help="say where the slowest spent it")
    parser.add_argument("--out", default="", help="file for the figures as JSON")
    options = parser.parse_args()
    port, rpc_port = free_ports(2)
    flags = [options.model, "--port", str(port), "--prefill", str(options.prefill)]
    flags += shlex.split(options.worker_flags)
    flags += ["--router.api-key", VICTIM, "--router.api-key", HOG]
    flags += ["--router.grpc-port", str(rpc_port)]
    line = subprocess.Popen([sys.executable, "-m", "tandem.cli", "up", *flags])
    url, kept, found = f"http://127.0.0.1:{port}", True, {}
    headers = {"Authorization": f"Bearer {VICTIM}"}
    try:
        wait_ready(url, line)
        with httpx.Client(base_url=url, headers=headers, timeout=options.patience) as client:
            measure(client, 3)
            print(f"{'hog':<18} {'p50 ms':>7} {'max ms':>7}", flush=True)
            for name in ("(alone)", *options.only):
                stored = store(client)
                if name == "(alone)":
                    row = measure(client, options.count)
                else:
                    row = cpu_pool(name, url, rpc_port, client, options.count)
                lost = client.get(f"/v1/responses/{stored}").status_code != 200
                kept = kept and not lost
                words = "   stored response lost" if lost else ""
                print(f"{name:<18} {row.text()}{words}", flush=True)
                if options.timeline:
                    print(f"    slowest: {row.slowest}", flush=True)
                found[name] = {"seconds": row.times, "failures": row.failures, "lost": lost}
    finally:
        line.send_signal(signal.SIGINT)
        line.wait(60)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=1)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
