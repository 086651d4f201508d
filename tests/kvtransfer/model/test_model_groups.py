"""Hand-offs of several groups, an item each, walked through every order of events, to a bound."""

import pytest
from tests.kvtransfer.model.checker import explore
from tests.kvtransfer.model.moves import ALL_FAULTS
from tests.kvtransfer.model.parts import Setup

from tandem.protocol.card import KVKind

pytestmark = pytest.mark.full

_THREE = (KVKind.FULL, KVKind.WINDOW, KVKind.STATE)
_LINKS = ("p restarts", "p counts d as lost", "d counts p as lost", "frame lost")
_COPIES = ("d counts p as lost", "d cancels", "p overwrites")


def _holds(setup, faults, at_least, *, whole=True):
    found = explore(setup, faults=faults, max_states=400_000 if whole else 1_000_000)
    print(f"\n{found.states} states, {found.transitions} transitions, {found.complete}")
    assert found.complete or not whole
    assert found.states >= at_least


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("setup", "at_least"),
    [
        pytest.param(
            Setup(
                num_blocks=2,
                kinds=(KVKind.FULL, KVKind.STATE),
                brisk=True,
                faults=(*_LINKS, "d cancels"),
            ),
            3_000,
            id="a recurrent state beside",
        ),
        pytest.param(
            Setup(num_blocks=2, kinds=_THREE[:2], faults=("d cancels",)),
            50_000,
            id="a window beside, whose first block is reused",
        ),
        pytest.param(
            Setup(num_blocks=2, d_block=2, kinds=_THREE, brisk=True, faults=_LINKS[1:2]),
            10_000,
            id="three groups into larger blocks",
        ),
        pytest.param(
            Setup(
                num_blocks=2,
                p_block=2,
                hit=1,
                kinds=_THREE,
                direct=True,
                brisk=True,
                faults=("p overwrites", "d cancels"),
            ),
            5_000,
            id="three groups of larger blocks copied, and half a hit",
        ),
        pytest.param(
            Setup(num_blocks=2, hit=2, kinds=_THREE, direct=True, brisk=True, faults=ALL_FAULTS),
            200,
            id="three groups, and a full hit",
        ),
        pytest.param(
            Setup(num_blocks=2, kinds=_THREE, direct=True, brisk=True, faults=_COPIES),
            50_000,
            marks=pytest.mark.nightly,
            id="three groups copied",
        ),
        pytest.param(
            Setup(
                num_blocks=1,
                kinds=_THREE,
                direct=True,
                brisk=True,
                faults=(*_COPIES, "p restarts"),
            ),
            20_000,
            id="three groups of a block copied",
        ),
        pytest.param(
            Setup(num_blocks=2, kinds=_THREE[:2], direct=True, brisk=True, faults=_LINKS[:1]),
            20_000,
            marks=pytest.mark.nightly,
            id="two groups copied, P restarts",
        ),
    ],
)
def test_what_d_uses_is_right_with_one_fault(setup, at_least):
    """Nothing is used before the last item is there, each key ends once, everything is given
    back."""
    _holds(setup, 1, at_least)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("setup", "faults"),
    [
        pytest.param(
            Setup(
                num_blocks=2,
                kinds=_THREE,
                direct=True,
                brisk=True,
                faults=(*_COPIES, "p restarts"),
            ),
            1,
            id="three groups copied, P restarts",
        ),
        pytest.param(
            Setup(
                num_blocks=2,
                kinds=_THREE,
                direct=True,
                brisk=True,
                faults=(*_LINKS, "d cancels", "p overwrites", "read fails", "p's deadline"),
            ),
            2,
            id="three groups copied, two faults",
        ),
        pytest.param(
            Setup(num_blocks=2, kinds=(KVKind.FULL, KVKind.STATE), faults=ALL_FAULTS),
            1,
            id="a recurrent state beside, at its own pace",
        ),
    ],
)
def test_the_same_holds_further_out(setup, faults):
    """A million states, where there are so many."""
    _holds(setup, faults, 300_000, whole=False)
