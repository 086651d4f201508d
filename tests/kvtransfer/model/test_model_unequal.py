"""Ends whose blocks differ in size, walked through every order of events, up to a bound."""

import pytest
from tests.kvtransfer.model.checker import explore
from tests.kvtransfer.model.moves import ALL_FAULTS
from tests.kvtransfer.model.parts import Setup

pytestmark = pytest.mark.full

_SOME = ("p restarts", "p counts d as lost", "d counts p as lost", "frame lost", "d cancels")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("setup", "at_least"),
    [
        pytest.param(
            Setup(num_blocks=2, d_block=2, brisk=True, faults=_SOME), 2_000, id="D's are larger"
        ),
        pytest.param(
            Setup(num_blocks=2, p_block=2, hit=1, brisk=True, faults=ALL_FAULTS),
            1_000,
            id="P's are larger, and half a hit",
        ),
        pytest.param(
            Setup(num_blocks=2, d_block=2, direct=True, brisk=True, faults=ALL_FAULTS),
            2_000,
            id="copies into a larger block",
        ),
        pytest.param(
            Setup(num_blocks=2, p_block=2, hit=1, direct=True, faults=ALL_FAULTS),
            1_000,
            id="copies of half a block",
        ),
    ],
)
def test_what_d_uses_is_right_with_one_fault(setup, at_least):
    """Each token in its place, each key ended once, everything given back."""
    found = explore(setup, faults=1, max_states=400_000)
    print(f"\n{found.states} states, {found.transitions} transitions")
    assert found.complete
    assert found.states >= at_least
