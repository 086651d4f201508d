"""CURVE keys over time: first, rotated, lost, half made. Virtual time."""

from __future__ import annotations

import msgspec
import pytest
from tests.operator.builders import spec as demo

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import Keys, LLMServiceStatus, RolloutStatus
from tandem.operator.clock import time_text
from tandem.operator.decide.keyring import KeyPlan, may_speak, plan_keys
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import see
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Identity, Role
from tandem.operator.desired.workload import rendered, stored_template
from tandem.operator.settings import OperatorSettings

NOW = 1_800_000_000.0
PUBLISH_SECONDS = 90.0


def plan(
    keys: dict[tuple[Role, int], str],
    before: Keys,
    *,
    in_use: list[int],
    rotation_id: str | None = None,
    now: float = NOW,
) -> KeyPlan:
    return plan_keys(
        keys,
        before,
        rotation_id=rotation_id,
        in_use=in_use,
        now=now,
        publish_seconds=PUBLISH_SECONDS,
    )


def held(*generations: int) -> dict[tuple[Role, int], str]:
    """Secrets of all roles for these generations."""
    return {(role, number): f"{role}{number}" for role in Role for number in generations}


def status(generation: int, *, ago: float = 1000, rotation_id: str | None = None) -> Keys:
    """Status of a generation that was published a while ago."""
    published = time_text(NOW - ago)
    return Keys(generation=generation, published_at=published, rotation_id=rotation_id)


def test_the_first_keys_are_used_at_once():
    made = plan({}, Keys(), in_use=[])
    assert (made.generation, made.active, made.waits) == (1, 1, 0)
    assert made.missing == list(Role)


def test_nothing_changes_while_nothing_is_asked():
    made = plan(held(1), status(1), in_use=[1])
    assert (made.generation, made.active, made.missing, made.retired) == (1, 1, [], [])
    assert made.status.rotating is False


def test_a_rotation_waits_until_pods_have_read_the_new_keys():
    """New keys are made and published first; pods get them after the wait."""
    asked = plan(held(1), status(1), rotation_id="a", in_use=[1])
    assert (asked.generation, asked.active) == (2, 1)
    assert asked.missing == list(Role)
    assert asked.waits == pytest.approx(PUBLISH_SECONDS)
    later = plan(
        held(1, 2), asked.status, rotation_id="a", in_use=[1], now=NOW + PUBLISH_SECONDS + 1
    )
    assert (later.generation, later.active, later.retired) == (2, 2, [])
    assert later.status.rotating is True


def test_old_keys_go_when_no_pod_uses_them():
    """The last pod of a generation takes it along."""
    made = plan(held(1, 2), status(2), in_use=[2])
    assert made.retired == [1]
    assert made.status.rotating is False


def test_a_lost_secret_is_a_rotation_of_all_roles():
    """A key that is gone is nowhere else: every role gets a new one."""
    keys = held(1)
    del keys[(Role.DECODE, 1)]
    made = plan(keys, status(1), in_use=[1])
    assert made.generation == 2
    assert made.missing == list(Role)


def test_a_half_made_generation_is_completed():
    """An operator that died between two Secrets is followed by one that makes the rest."""
    keys = {**held(1), (Role.ROUTER, 2): "router2"}
    made = plan(keys, status(1), in_use=[1])
    assert made.generation == 2
    assert made.missing == [Role.PREFILL, Role.DECODE]


def test_a_lost_status_finds_its_keys_again():
    """Secrets that are whole are used although the status forgot them."""
    made = plan(held(3), Keys(), in_use=[3])
    assert (made.generation, made.active, made.missing) == (3, 3, [])


def test_first_keys_that_are_half_made_are_completed():
    """A first generation that nobody uses yet is made whole, not skipped."""
    made = plan({(Role.ROUTER, 1): "router1"}, Keys(), in_use=[])
    assert (made.generation, made.active) == (1, 1)
    assert made.missing == [Role.PREFILL, Role.DECODE]


def test_a_lost_key_is_told_as_long_as_pods_have_it():
    """A router that starts after the loss must reach the decode workers that still run."""
    published = held(1)
    left = {pair: key for pair, key in held(1).items() if pair[0] is not Role.DECODE}

    told = may_speak(left, published, in_use=[1], retired=[])
    assert told == published
    assert may_speak(left, published, in_use=[], retired=[]) == left
    assert may_speak(held(1, 2), published, in_use=[2], retired=[1]) == held(2)


def test_a_rotation_goes_on_as_soon_as_pods_have_read_the_keys():
    """What they say counts at once, and is remembered whatever they say later."""
    published = Keys(generation=2, rotation_id="a", published_at=time_text(NOW), read=1)
    both = held(1, 2)

    def seen(before: Keys, *, all_read: bool) -> KeyPlan:
        return plan_keys(
            both, before, rotation_id="a", in_use=[1], now=NOW + 3, publish_seconds=90,
            all_read=all_read,
        )  # fmt: skip

    waiting = seen(published, all_read=False)
    assert (waiting.active, round(waiting.waits), waiting.status.read) == (1, 87, 1)
    read = seen(published, all_read=True)
    assert (read.active, read.waits, read.status.read) == (2, 0, 2)
    assert seen(read.status, all_read=False).active == 2


def test_what_pods_said_of_earlier_keys_counts_for_those_only():
    """A generation that is new now has been read by nobody."""
    before = Keys(generation=1, published_at=time_text(NOW - 900), read=1)
    begun = plan_keys(
        held(1), before, rotation_id="a", in_use=[1], now=NOW, publish_seconds=90, all_read=True
    )
    assert (begun.generation, begun.active, begun.waits) == (2, 1, 90)


def test_a_generation_that_could_not_be_made_whole_is_tried_again():
    """Its number stays for as long as a name is taken, and no pod gets a half of it."""
    before = status(1)
    asked = plan(held(1), before, rotation_id="a", in_use=[1])
    half = {**held(1), (Role.ROUTER, 2): "router2", (Role.PREFILL, 2): "prefill2"}
    left = asked.held_back(before)
    assert left.status == before
    for later in (1, 1000):
        again = plan(half, left.status, rotation_id="a", in_use=[1], now=NOW + later)
        assert (again.generation, again.active, again.retired) == (2, 1, [])
        assert again.missing == [Role.DECODE]
        left = again.held_back(left.status)
    made = plan(held(1, 2), left.status, rotation_id="a", in_use=[1], now=NOW + 2000)
    assert (made.generation, made.active, made.missing) == (2, 1, [])
    assert made.status.generation == 2


def test_first_keys_that_could_not_be_made_whole_are_tried_again():
    """The first generation stays the first."""
    left = plan({}, Keys(), in_use=[]).held_back(Keys())
    again = plan({(Role.ROUTER, 1): "router1"}, left.status, in_use=[])
    assert (again.generation, again.missing) == (1, [Role.PREFILL, Role.DECODE])


def test_keys_stay_that_the_stable_revision_mounts():
    """A service that was suspended and rotated meanwhile has no pods, and goes back to its stable
    revision on resume: its pods would wait for their Secrets for ever. Nobody waits for those keys
    to be read."""
    spec = msgspec.convert(demo(suspend=True), LLMServiceSpec)
    owner = Identity("ns", "demo", "uid")
    facts = Facts(owner=owner, spec=spec, settings=OperatorSettings(), key_generation=1)
    stable = {role: facts.revision(role) for role in Role}
    templates = {
        (owner.child(role, name)): stored_template(facts, role, name, rendered(facts, role))
        for role, name in stable.items()
    }
    rollout = RolloutStatus(stable={str(role): name for role, name in stable.items()})
    before = LLMServiceStatus(rollout=rollout, keys=status(2))
    seen = see(owner, 1, spec, before, Snapshot({"ControllerRevision": templates}))
    assert seen.in_use() == []
    assert seen.needed() == {1}
    made = plan_keys(
        held(1, 2), before.keys, rotation_id=None, in_use=[], needed=seen.needed(), now=NOW,
        publish_seconds=PUBLISH_SECONDS,
    )  # fmt: skip
    assert (made.active, made.waits, made.retired, made.status.rotating) == (2, 0, [], True)
    moved = LLMServiceStatus(rollout=RolloutStatus(stable={"decode": "another"}))
    assert see(owner, 1, spec, moved, Snapshot({"ControllerRevision": templates})).needed() == set()
