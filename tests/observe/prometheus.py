"""A real Prometheus beside a stack: it scrapes, records and evaluates; asked over HTTP."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from scripts.rules import chart, promtool
from tests.waiting import wait_for

from tandem.cli.serve.listening import LOOPBACK, free_ports

EVERY = "2s"
START_SECONDS, STOP_SECONDS, ASK_SECONDS = 60.0, 20.0, 30.0


class Target(NamedTuple):
    """A process that is scraped, with the labels that the chart's monitors would give it."""

    pod: str
    role: str
    port: int
    service: str = "observed"


class Series(NamedTuple):
    labels: Mapping[str, str]
    points: list[tuple[float, float]]
    """(seconds on the wall clock, value)."""


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=ASK_SECONDS)

    @classmethod
    @contextmanager
    def running(
        cls,
        folder: Path,
        targets: list[Target],
        settings: Mapping[str, object] | None = None,
        waits: Mapping[str, str] | None = None,
    ) -> Iterator[Prometheus]:
        """While the block runs; its log is ``prometheus.log`` in ``folder``. ``settings`` of the
        chart's rules, and ``waits`` of alerts, are those that are not its defaults."""
        program = promtool.build("prometheus")
        (folder / "rules.yaml").write_text(
            yaml.safe_dump(chart.rule_file(settings, waits), width=1000)
        )
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(_config(targets)))
        [port] = free_ports(1)
        command = [str(program), f"--config.file={config}", "--log.level=warn"]
        command += [f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={LOOPBACK}:{port}"]
        with (folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            found = cls(f"http://{LOOPBACK}:{port}")
            try:
                wait_for(found.ready, START_SECONDS, seen=lambda: "Prometheus is not ready")
                yield found
            finally:
                found.close()
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                process.kill()
                process.wait()

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        if self._http.is_closed:
            return False
        with suppress(httpx.HTTPError):
            return self._http.get("/-/ready").is_success
        return False

    def ask(self, expression: str) -> list[float]:
        """The values of an expression now, one a series."""
        answer = self._http.get("/api/v1/query", params={"query": expression})
        if answer.is_error:
            raise ValueError(f"{expression}: {answer.text}")
        return [float(each["value"][1]) for each in answer.json()["data"]["result"]]

    def over(self, expression: str, begin: float, end: float, step: float) -> list[Series]:
        """The values of an expression over time, one a series; ``step`` in seconds."""
        asked: dict[str, str | float] = {"query": expression, "start": begin, "end": end}
        answer = self._http.get("/api/v1/query_range", params={**asked, "step": step})
        if answer.is_error:
            raise ValueError(f"{expression}: {answer.text}")
        return [
            Series(each["metric"], [(float(at), float(value)) for at, value in each["values"]])
            for each in answer.json()["data"]["result"]
        ]

    def rules(self) -> dict[str, Mapping[str, Any]]:
        """Rules by name, with their health and, of alerts, their state."""
        groups = self._http.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def firing(self) -> set[tuple[str, str]]:
        """Services and names of the alerts that fire; the service, which the operator's series have
        in a label of their own, is empty for who has none."""
        found = self._http.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        return {
            (_service(each["labels"]), each["labels"]["alertname"])
            for each in found
            if each["state"] == "firing"
        }

    def counted(self) -> dict[str, int]:
        """How many series each process has, by its pod; those that Prometheus adds are left out."""
        counts = 'count by (pod) ({pod!="",__name__!~"up|scrape_.*"})'
        found = self._http.get("/api/v1/query", params={"query": counts}).raise_for_status()
        result = found.json()["data"]["result"]
        return {each["metric"]["pod"]: int(each["value"][1]) for each in result}

    def targets_up(self) -> int:
        return int(sum(self.ask("up")))


def _service(labels: Mapping[str, str]) -> str:
    return labels.get("tandem_dev_service", "") or labels.get("llmservice", "")


def _config(targets: list[Target]) -> dict[str, Any]:
    static = [
        {
            "targets": [f"{LOOPBACK}:{each.port}"],
            "labels": {
                "namespace": "default",
                "pod": each.pod,
                "tandem_dev_service": each.service,
                "tandem_dev_role": each.role,
            },
        }
        for each in targets
    ]
    return {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "tandem", "static_configs": static}],
    }
