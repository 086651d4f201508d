"""Pods of one node, on CPUs: KV goes by the node's agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from client import Answer, stream
from reference import rows
from tests.e2e_cluster import pods
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Kube, wait_for
from tests.e2e_cluster.node_agent import Agent, installed, meets_at
from tests.e2e_cluster.service import NAME, Service
from tests.e2e_cluster.setup import Setup

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

HANDED_OVER = 40
"""A prompt of the reference, long enough to be handed over."""


@pytest.fixture(scope="module")
def node(cluster: Kube) -> str:
    """The node on which all of it is."""
    return min(pods.name_of(each) for each in cluster.items("nodes"))


@pytest.fixture(scope="module")
def agent(
    cluster: Kube, kube: Kube, setup: Setup, operator: Installed, node: str
) -> Iterator[Agent]:
    """The node's agent, as the chart has it."""
    with installed(cluster, setup, node=node, user=kube) as found:
        yield found


@pytest.fixture(scope="module")
def near(kube: Kube, setup: Setup, agent: Agent, node: str) -> Iterator[Service]:
    """A prefill and a decode worker on the node, which meet its agent in its folder."""
    served = Service(kube, setup, name="near", changes=meets_at(node))
    served.apply()
    served.wait_ready()
    yield served
    served.leave()


@pytest.mark.nightly
def test_pods_of_a_node_hand_over_by_its_agent(near: Service, agent: Agent) -> None:
    """Neither sees the other's memory, nothing of the KV goes by a network, and the agent's series
    say what it copied."""
    wait_for("workers at the agent", lambda: _registered(agent) == (1, 1), seconds=60)
    # Workers may be there before their agent, whose links come back from a network then.
    wait_for("links by the agent", lambda: _links_by_agent(near) == 1, seconds=60)
    copied, handed_over = agent.copied(), near.handed_over()

    (answer,) = asyncio.run(_stream(near.url(), HANDED_OVER))

    _hold(HANDED_OVER, [answer])
    grown = near.handed_over() - handed_over
    assert grown > 0
    assert agent.copied() - copied >= grown
    series = agent.series()
    assert pods.total(series, "tandem:kv_agent_callers_lost_total") == 0, series


async def _stream(url: str, index: int) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return [await stream(client, rows()[index].prompt, model=NAME)]


def _hold(index: int, answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.error is None, answer.error
        assert rows()[index].verdict(answer.tokens) in ("equal", "excused")


def _registered(agent: Agent) -> tuple[float, float]:
    series = agent.series()
    return (
        series['tandem:kv_agent_workers{role="producer"}'],
        series['tandem:kv_agent_workers{role="consumer"}'],
    )


def _links_by_agent(near: Service) -> float:
    (router,) = near.pods("router")
    return sum(
        value
        for sample, value in pods.metrics(near.kube, router).items()
        if sample.startswith("tandem:router_handoff_link_info")
        and 'transport="shm_agent"' in sample
        and 'state="up"' in sample
    )
