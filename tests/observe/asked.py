"""What `make observe` and `make observe-cluster` share: how services are, and what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.observe import judge, picture, report
from tests.observe.prometheus import Prometheus
from tests.screens.load import loaded, own, shared

ROUTERS = {
    "observed": [],
    "elastic": ["--no-strict-handoff"],
}
"""Flags of the routers by service; with a placement by forecasts there are fewer hand-offs."""
PULLING = {"elastic": ["--kv-pull-peers", "1", "--max-num-seqs", "2"]}
"""Flags of workers by service: so few seats that who holds a prefix is often full, and another
worker pulls it."""
PULLERS = 4
"""Clients that ask such a service for the same beginnings at a time."""


@contextmanager
def asking(service: str, url: str, clients: int) -> Iterator[None]:
    """While the block runs, clients ask what nobody else asks; of workers that pull one of them,
    beside those who share their beginnings."""
    kinds = {own: 1, shared: PULLERS} if service in PULLING else {own: clients}
    with ExitStack() as open_:
        for asked, count in kinds.items():
            open_.enter_context(loaded(url, clients=count, max_tokens=48, asked=asked))
        yield


def everything(prometheus: Prometheus, pictures: Path | None) -> report.Seen:
    """Every panel, rule and alert's series; and a picture of each board, where there is a folder
    for it, which is made."""
    seen = report.Seen(
        judge.settled(judge.panels, prometheus),
        judge.settled(judge.records, prometheus),
        judge.settled(judge.alerts, prometheus),
        prometheus.rules(),
        series=prometheus.counted(),
    )
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for path in picture.take(prometheus, pictures):
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return seen
