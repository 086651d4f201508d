"""A pull that is hurt while one of its frames is held costs time at most, and leaves nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos import aim
from tests.chaos.aim import moments_of
from tests.chaos.aimed_peers import AimedPeers, aimed
from tests.kvtransfer.agent.agents import Running
from tests.workers.pair import PROMPT
from tests.workers.pullers import Peer

from tandem.kvtransfer.events import Loaded
from tandem.kvtransfer.handoff.messages import Part, Ready

OTHER = tuple(5 + (13 * index) % 280 for index in range(140))
SMALL = {"num_gpu_blocks_override": 12}
CONNECTORS = ("tcp", "shm", "shm_agent")
Make = Callable[..., Any]


@pytest.fixture
def node() -> Iterator[Running]:
    """A folder in which an agent serves; a short name: that of a socket is bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        running = Running(Path(name))
        yield running
        running.stop()


@pytest.fixture(
    params=[
        pytest.param(each, marks=[] if each == "tcp" else pytest.mark.nightly)
        for each in CONNECTORS
    ]
)
def make(request: pytest.FixtureRequest) -> Make:

    def folder() -> Path:
        running: Running = request.getfixturevalue("node")
        return running.agent.path.parent

    return lambda **more: aimed(request.param, folder, **more)


@pytest.fixture
def moments(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """At which a pull over the connector can be hurt."""
    return tuple(moments_of(request.node.callspec.params["make"]))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A frame is held until the test lets go of it, and no link is lost meanwhile: settings."""
    monkeypatch.setattr(aim, "HOLD_SECONDS", 60.0)
    return {"kv_beat_timeout": 120.0}


def test_a_holder_that_stops_costs_no_more_than_the_budget(make: Make, moments: tuple[str, ...]):
    """At whatever frame, and it goes on afterwards: what it says too late is answered, and it has
    its blocks back."""
    with make() as line:
        for moment in moments:
            if moment == "taken":  # of the last part nobody waits for it
                continue
            held, key = line.hold(moment, moment, budget_ms=150)
            line.peers.standing.add(1)
            line.peers.until(lambda name=key.request: line.peers[0].finished(name))
            assert line.peers[0].tokens(key.request) == line.before
            held.release()
            line.peers.standing.clear()
            line.forget()
        count = len(moments) - ("taken" in moments) + line.too_late
        assert (line.fallbacks("timeout"), line.pulled) == (count, 0)
        assert_serves(line)


def test_a_holder_that_is_gone_is_not_waited_for(make: Make, moments: tuple[str, ...]):
    """It says no more, and its connections are closed: long before the budget is spent the prompt
    is computed, and what comes back later is another link."""
    with make() as line:
        for moment in (moments[0], moments[-1]):
            _, _ = line.hold(moment, moment)
            line.peers.standing.add(1)
            line.proxies[1].sever()
            line.peers.until(lambda name=moment: line.peers[0].finished(name))
            assert line.peers[0].tokens(moment) == line.before
            line.peers.standing.clear()
            line.proxies[1].restore()
            line.forget()
            line.peers.until(lambda: line.peers[0].ends.consumer.peer_up(line.peers[1].me))
        assert (line.fallbacks("peer"), line.pulled) == (2, 0)
        assert_serves(line)


def test_a_flipped_bit_is_not_used(make: Make):
    """Of a part in its slot, or of the tag of a block: the prompt is computed."""
    with make(kv_quarantine_seconds=0.2) as line:
        held, _ = line.hold("kv", "a")
        parts = line.peers[1].ends.producer._mover
        if isinstance(held.message, Part):
            where = held.message.slot * parts.memory.slot_bytes + held.message.nbytes - 1
            parts.memory.span(where, 1)[0] ^= 4
        else:
            assert isinstance(held.message, Ready)
            tags = parts.blocks.tags
            tags._bytes[held.message.blocks[0][1] * 16 + 3] ^= 4
        held.release()
        line.peers.until(lambda: line.peers[0].finished("a"))
        assert line.peers[0].tokens("a") == line.before
        cause = "digest" if isinstance(held.message, Part) else "identity"
        assert (line.fallbacks(cause), line.pulled) == (1, 0)
        line.peers.settled()


def test_a_client_that_leaves_takes_the_pull_along(make: Make, moments: tuple[str, ...]):
    """At whatever frame: no end waits for a budget of a minute."""
    with make(kv_lease_seconds=90.0) as line:
        for moment in moments:
            held, key = line.hold(moment, moment)
            assert line.peers[0].core.abort(key)
            line.peers[0].step()
            held.release()
            line.forget()
        assert_serves(line)


def test_what_a_pull_reads_is_not_evicted(
    make: Make, moments: tuple[str, ...], patient: dict[str, Any]
):
    """While a frame is held the holder forgets its cache and computes other prompts in every block
    that it has left: what comes is right. Before it was asked it has nothing to lend."""
    with make(engine=SMALL, kv_pull_quota=0.5, **patient) as line:
        for moment in moments:
            held, _ = line.hold(moment, moment)
            line.peers[1].core.manager.reset_prefix_cache()
            for index in range(2):
                line.peers.run(1, f"{moment} {index}", [7 + index, *OTHER[:90]])
            held.release()
            line.peers.until(lambda name=moment: line.peers[0].finished(name))
            assert line.peers[0].tokens(moment) == line.before
            line.forget()
            line.peers[1].core.manager.reset_prefix_cache()
            line.peers.run(1, f"{moment} again", PROMPT)
        assert (line.fallbacks("gone"), line.pulled) == (1, len(moments) - 1)
        line.peers.settled()


def test_a_puller_that_is_short_of_blocks_is_preempted_behind_its_pull(
    make: Make, patient: dict[str, Any]
):
    """Its blocks are its own while they are written, whoever wants some; once it runs it may be
    preempted, and is computed again."""
    with make(engine=SMALL, kv_pull_quota=0.5, **patient) as line:
        alone = line.peers.run(1, "alone", PROMPT, max_tokens=40)
        other = line.peers.run(1, "other alone", OTHER[:30], max_tokens=90)
        line.peers[1].core.manager.reset_prefix_cache()
        line.peers.run(1, "once more", PROMPT)
        line.peers.ask(0, "other", OTHER[:30], max_tokens=90)
        line.peers.until(lambda: bool(line.peers[0].tokens("other")))
        held, key = line.hold("final", "a", max_tokens=40)
        line.peers.until(lambda: len(line.peers[0].tokens("other")) > 60)
        groups = line.peers[0].core.scheduler.request_table.groups
        assert not any(each.num_preemptions for each in groups.values())
        line.peers.standing.add(0)  # or the other is short of blocks before this one runs
        held.release()
        line.peers.until(lambda: has_come(line.peers[0]))
        line.peers.standing.clear()
        line.peers.until(lambda: any(each.num_preemptions for each in groups.values()))
        assert groups[key].num_preemptions == 1
        line.peers.until(lambda: all(line.peers[0].finished(each) for each in ("a", "other")))
        assert line.peers[0].tokens("a") == alone
        assert line.peers[0].tokens("other") == other
        assert line.pulled == 1
        line.peers.settled()


def has_come(puller: Peer) -> bool:
    """Whether all of its pull is there, which its engine learns at its next step."""
    assert not puller.ends.taken.of_handoffs()
    return any(isinstance(each, Loaded) for each in puller.ends.taken._of_pulls)


def assert_serves(line: AimedPeers) -> None:
    """Nothing is held, and the next pull comes."""
    line.forget()
    assert line.peers.run(0, "behind", PROMPT, holder=1) == line.before
    assert line.pulled == 1
    line.peers.settled()
