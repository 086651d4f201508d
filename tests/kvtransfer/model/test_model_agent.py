"""The hand-off by a node's agent, walked as in test_model: agents end at any time, and what they
have begun lands late, or never."""

import pytest
from tests.kvtransfer.model import mutations
from tests.kvtransfer.model.blocks import Home
from tests.kvtransfer.model.checker import Counterexample, explore
from tests.kvtransfer.model.moves import ALL_FAULTS
from tests.kvtransfer.model.parts import Setup
from tests.kvtransfer.model.test_model import _LINKS, _told

pytestmark = pytest.mark.full


def by_agent(**more):
    """A world in which an agent copies, a block a copy."""
    return Setup(**{"num_blocks": 1, "direct": True, "agent": True, **more})


_TWO = {"num_keys": 2, "receive_slots": 1, "home": Home.REUSED, "brisk": True}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("setup", "faults", "at_least"),
    [
        pytest.param(
            by_agent(faults=ALL_FAULTS),
            2,
            100_000,
            marks=pytest.mark.nightly,
            id="a copy, two faults",
        ),
        pytest.param(by_agent(faults=ALL_FAULTS), 1, 5_000, id="a copy, one fault"),
        pytest.param(
            by_agent(num_blocks=2, receive_slots=1, faults=ALL_FAULTS),
            1,
            40_000,
            id="two copies through one slot",
        ),
        pytest.param(
            by_agent(**_TWO, faults=(*_LINKS, "d cancels", "p's deadline", "agent ends")),
            1,
            20_000,
            id="two keys share a slot and P's blocks",
        ),
    ],
)
def test_no_order_of_events_gives_wrong_tokens_or_leaves_anything_held(setup, faults, at_least):
    """Every state keeps the promises, and from each both ends come to rest, no slot held."""
    found = _told(f"agent, {faults} faults", explore(setup, faults=faults, max_states=400_000))
    assert found.complete
    assert found.states >= at_least


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("setup", "faults"),
    [
        pytest.param(by_agent(faults=ALL_FAULTS), 3, id="a copy, three faults"),
        pytest.param(
            by_agent(**_TWO, faults=(*_LINKS, "d cancels", "p's deadline", "agent ends")),
            2,
            id="two keys share a slot and P's blocks, two faults",
        ),
    ],
)
def test_the_same_holds_further_out(setup, faults):
    """A million states, where there are so many."""
    found = _told(f"agent, {faults} faults", explore(setup, faults=faults, max_states=1_000_000))
    assert found.states >= 300_000


MUTANTS = {
    "the tag's event": (by_agent(exports=mutations.NoFence), 0),
    "the incarnation check": (
        by_agent(session=mutations.NoIncarnation, closed_ears=False, faults=("p restarts",)),
        1,
    ),
    "the order of bytes and tags": (by_agent(hasty_tags=True, faults=("p overwrites",)), 1),
    "the comparison of tags": (by_agent(compares=False, faults=("p overwrites",)), 1),
    "the turns of tags": (
        by_agent(
            **{**_TWO, "home": Home.SHARED},
            turns=False,
            faults=("router cancels", "d cancels", "p's deadline"),
        ),
        1,
    ),
    "the slot quarantine": (
        by_agent(
            **{**_TWO, "home": Home.OWN},
            landing=mutations.NoLandingQuarantine,
            faults=("d counts p as lost",),
        ),
        1,
    ),
    "new slots for each agent": (
        by_agent(**{**_TWO, "home": Home.OWN}, new_slots=False, faults=("agent ends",)),
        1,
    ),
}


@pytest.mark.parametrize("guard", MUTANTS)
def test_without_a_guard_the_checker_finds_the_harm(guard):
    """The guard is needed, and the checker can see what it prevents."""
    setup, faults = MUTANTS[guard]
    with pytest.raises(Counterexample) as caught:
        explore(setup, faults=faults, max_states=400_000, liveness=False)
    assert str(caught.value).startswith("D uses ")
    print(f"\n{caught.value}")


def test_without_waiting_for_its_own_copies_d_writes_blocks_that_are_free():
    """What has landed is copied on by D: its blocks are free behind that, too."""
    setup = by_agent(imports=mutations.NoWait, faults=("d cancels",))
    with pytest.raises(Counterexample, match="writes blocks that are free"):
        explore(setup, faults=1, max_states=400_000, liveness=False)
