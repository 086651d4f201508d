"""A cached prefix that D pulls, walked through every order of events: evictions, declined loans,
steps that still write what is cached, and every fault of a hand-off."""

import pytest
from tests.kvtransfer.model.blocks import Home, Lending
from tests.kvtransfer.model.checker import Counterexample, explore
from tests.kvtransfer.model.moves import ALL_FAULTS
from tests.kvtransfer.model.parts import Setup

pytestmark = pytest.mark.full

_SHARED = ("router cancels", "d cancels", "p's deadline", "d counts p as lost")


@pytest.mark.timeout(900)  # searches, as long as the machine makes them
@pytest.mark.parametrize(
    ("setup", "faults", "at_least"),
    [
        pytest.param(Setup(num_blocks=1, faults=ALL_FAULTS), 2, 15_000, id="one part, two faults"),
        pytest.param(
            Setup(num_blocks=2, direct=True, faults=ALL_FAULTS), 1, 6_000, id="two copies"
        ),
        pytest.param(
            Setup(num_keys=2, num_blocks=1, direct=True, home=Home.SHARED, faults=_SHARED),
            1,
            20_000,
            id="two keys pull the same blocks",
        ),
        pytest.param(
            Setup(num_keys=2, num_blocks=1, send_slots=1, home=Home.SHARED, faults=_SHARED),
            1,
            25_000,
            id="two keys pull the same blocks by one slot",
        ),
    ],
)
def test_no_order_of_events_gives_wrong_tokens_or_leaves_anything_held(setup, faults, at_least):
    """Every state within the bound keeps the promises, and from each both ends come to rest."""
    setup = setup._replace(lends=Lending())
    found = explore(setup, faults=faults, max_states=400_000)
    print(f"\n{faults} faults: {found.states} states, {found.transitions}, {found.complete}")
    assert found.complete
    assert found.states >= at_least


@pytest.mark.parametrize("direct", [False, True], ids=["slots", "copies"])
@pytest.mark.parametrize(
    "lending",
    [
        pytest.param(Lending(holds=False), id="the hold on lent blocks"),
        pytest.param(Lending(fences=False), id="the fence behind what is cached"),
    ],
)
def test_without_a_guard_the_checker_finds_the_harm(lending, direct):
    """A lent block that is evicted and reused, or that is not written yet, is wrong tokens."""
    setup = Setup(num_blocks=1, direct=direct, lends=lending)
    with pytest.raises(Counterexample) as caught:
        explore(setup, faults=0, max_states=400_000, liveness=False)
    assert str(caught.value).startswith("D uses ")
    print(f"\n{caught.value}")
