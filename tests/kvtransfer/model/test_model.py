"""The hand-off's tables, rings and sessions walked through every order of events, up to a bound.

The bound of each test is small enough for every run; those marked `full` and `nightly` go further.
Each prints how many states it saw (`pytest -s`).
"""

import pytest
from tests.kvtransfer.model import mutations
from tests.kvtransfer.model.blocks import Home
from tests.kvtransfer.model.checker import Counterexample, explore
from tests.kvtransfer.model.moves import ALL_FAULTS
from tests.kvtransfer.model.parts import TAKEN, Setup

from tandem.kvtransfer.handoff.tables import CONSUMER, PRODUCER
from tandem.protocol.card import KVKind

_LINKS = ("p restarts", "p counts d as lost", "d counts p as lost", "frame lost")


def _told(name, found):
    print(f"\n{name}: {found.states} states, {found.transitions} transitions, {found.complete}")
    return found


@pytest.mark.timeout(900)  # searches, as long as the machine makes them
@pytest.mark.parametrize(
    ("setup", "faults", "at_least"),
    [
        pytest.param(Setup(num_blocks=1, faults=ALL_FAULTS), 1, 5_000, id="one part, one fault"),
        pytest.param(
            Setup(num_blocks=1, faults=ALL_FAULTS),
            2,
            80_000,
            marks=pytest.mark.nightly,
            id="one part, two faults",
        ),
        pytest.param(
            Setup(num_blocks=2, faults=ALL_FAULTS),
            1,
            80_000,
            marks=pytest.mark.nightly,
            id="two parts, one fault",
        ),
        pytest.param(
            Setup(num_blocks=2, hit=1, faults=ALL_FAULTS), 1, 10_000, id="half a hit, one fault"
        ),
        pytest.param(
            Setup(num_blocks=1, hit=1, faults=ALL_FAULTS), 1, 3_000, id="a full hit, one fault"
        ),
        pytest.param(
            Setup(num_blocks=1, hit=1, faults=ALL_FAULTS),
            2,
            20_000,
            marks=pytest.mark.nightly,
            id="a full hit, two faults",
        ),
        pytest.param(
            Setup(num_blocks=1, finish="stop", faults=ALL_FAULTS), 1, 3_000, id="token 1 ends it"
        ),
        pytest.param(
            Setup(
                num_blocks=2,
                finish="stop",
                false_end=True,
                faults=("d counts p as lost", "d cancels", "router cancels"),
            ),
            1,
            10_000,
            marks=pytest.mark.full,
            id="a false end, one fault",
        ),
        pytest.param(
            Setup(num_blocks=2, p_len=3, d_len=9, asked=9, faults=("router cancels",)),
            1,
            3_000,
            id="P's limit is less",
        ),
        pytest.param(
            Setup(num_blocks=2, p_len=9, d_len=3, asked=3, faults=("router cancels",)),
            1,
            2_000,
            id="D's limit is less",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                receive_slots=1,
                send_slots=1,
                faults=(*_LINKS, "d cancels", "p's deadline"),
                brisk=True,
            ),
            1,
            20_000,
            marks=pytest.mark.full,
            id="two keys share a slot",
        ),
        pytest.param(
            Setup(num_blocks=1, direct=True, faults=ALL_FAULTS),
            2,
            50_000,
            marks=pytest.mark.nightly,
            id="a copy, two faults",
        ),
        pytest.param(
            Setup(num_blocks=2, direct=True, faults=ALL_FAULTS),
            1,
            30_000,
            marks=pytest.mark.nightly,
            id="two copies, one fault",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                direct=True,
                home=Home.REUSED,
                brisk=True,
                faults=(*_LINKS, "d cancels", "p's deadline"),
            ),
            1,
            10_000,
            marks=pytest.mark.full,
            id="P's blocks are copied and reused",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                direct=True,
                home=Home.SHARED,
                brisk=True,
                faults=("router cancels", "d cancels", "p's deadline"),
            ),
            1,
            10_000,
            marks=pytest.mark.full,
            id="two keys share P's blocks and tags",
        ),
        pytest.param(
            Setup(num_keys=2, num_blocks=1, send_slots=1, heads=True, brisk=True, faults=_LINKS),
            1,
            10_000,
            marks=pytest.mark.full,
            id="a send slot is packed again while it is read",
        ),
    ],
)
def test_no_order_of_events_gives_wrong_tokens_or_leaves_anything_held(setup, faults, at_least):
    """Every state within the bound keeps the promises, and from each both ends come to rest."""
    found = _told(f"{faults} faults", explore(setup, faults=faults, max_states=400_000))
    assert found.complete
    assert found.states >= at_least


def test_the_walks_take_nearly_every_rule_of_the_tables():
    """What is not taken within two short walks is only what an end would do that breaks the
    protocol, and orders that need more time than the walks have."""
    TAKEN.clear()
    for finish in (None, "stop"):
        setup = Setup(num_blocks=1, finish=finish, faults=ALL_FAULTS)
        explore(setup, faults=1, max_states=400_000, liveness=False)
    rules = [*PRODUCER, *CONSUMER]
    missed = [rule for rule in rules if rule not in TAKEN]
    print(f"\n{len(rules) - len(missed)} of {len(rules)} rules; missed: {missed}")
    assert len(missed) < 0.25 * len(rules)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("setup", "faults"),
    [
        pytest.param(Setup(num_blocks=1, faults=ALL_FAULTS), 3, id="one part, three faults"),
        pytest.param(Setup(num_blocks=2, faults=ALL_FAULTS), 2, id="two parts, two faults"),
        pytest.param(
            Setup(
                num_keys=2, num_blocks=1, receive_slots=1, faults=(*_LINKS, "d cancels"), brisk=True
            ),
            2,
            id="two keys, two faults",
        ),
        pytest.param(
            Setup(num_blocks=2, direct=True, faults=ALL_FAULTS), 2, id="two copies, two faults"
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                direct=True,
                home=Home.REUSED,
                faults=(*_LINKS, "d cancels", "p's deadline"),
            ),
            2,
            id="P's blocks are copied and reused, two faults",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=2,
                direct=True,
                home=Home.SHARED,
                brisk=True,
                faults=(*_LINKS, "router cancels", "d cancels", "p's deadline"),
            ),
            1,
            id="two keys share P's blocks and tags, two parts",
        ),
    ],
)
def test_the_same_holds_further_out(setup, faults):
    """A million states, where there are so many."""
    found = _told(f"{faults} faults", explore(setup, faults=faults, max_states=1_000_000))
    assert found.states >= 300_000


@pytest.mark.parametrize(
    ("setup", "faults"),
    [
        pytest.param(
            Setup(num_blocks=1, imports=mutations.NoCommit, faults=("p counts d as lost",)),
            1,
            id="the commit check",
        ),
        pytest.param(
            Setup(
                num_blocks=1,
                session=mutations.NoIncarnation,
                closed_ears=False,
                faults=("p restarts",),
            ),
            1,
            id="the incarnation check",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                receive_slots=1,
                ring=mutations.NoQuarantine,
                faults=("d cancels",),
                brisk=True,
                strict_slots=False,
            ),
            1,
            id="the slot quarantine",
        ),
        pytest.param(Setup(num_blocks=1, exports=mutations.NoFence), 0, id="READY's event"),
        pytest.param(
            Setup(num_blocks=1, direct=True, exports=mutations.NoFence), 0, id="the tag's event"
        ),
        pytest.param(
            Setup(
                num_blocks=1,
                direct=True,
                session=mutations.NoIncarnation,
                closed_ears=False,
                faults=("p restarts",),
            ),
            1,
            id="the incarnation check of copies",
        ),
        pytest.param(
            Setup(num_blocks=1, direct=True, hasty_tags=True, faults=("p overwrites",)),
            1,
            id="the order of bytes and tags",
        ),
        pytest.param(
            Setup(num_blocks=1, direct=True, compares=False, faults=("p overwrites",)),
            1,
            id="the comparison of tags",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                direct=True,
                home=Home.SHARED,
                brisk=True,
                turns=False,
                faults=("router cancels", "d cancels", "p's deadline"),
            ),
            1,
            id="the turns of tags",
        ),
        pytest.param(
            Setup(
                num_blocks=1,
                kinds=(KVKind.FULL, KVKind.WINDOW, KVKind.STATE),
                imports=mutations.AllButOneItem,
                brisk=True,
            ),
            0,
            id="the completeness of each item",
        ),
        pytest.param(
            Setup(
                num_blocks=2,
                kinds=(KVKind.FULL, KVKind.STATE),
                direct=True,
                imports=mutations.AllButOneItem,
                brisk=True,
            ),
            0,
            id="the completeness of each copied item",
        ),
        pytest.param(
            Setup(
                num_blocks=2,
                kinds=(KVKind.FULL, KVKind.WINDOW),
                imports=mutations.NoWindowItem,
                brisk=True,
            ),
            0,
            id="the item of a window",
        ),
        pytest.param(
            Setup(
                num_blocks=2,
                kinds=(KVKind.FULL, KVKind.WINDOW),
                direct=True,
                imports=mutations.NoWindowItem,
                brisk=True,
            ),
            0,
            id="the copied item of a window",
        ),
        pytest.param(
            Setup(num_blocks=2, kinds=(KVKind.STATE,), exports=mutations.AnyFence),
            0,
            id="the last token's fence before a state",
        ),
        pytest.param(
            Setup(num_blocks=2, kinds=(KVKind.STATE,), direct=True, exports=mutations.AnyFence),
            0,
            id="the last token's fence before a copied state",
        ),
    ],
)
def test_without_a_guard_the_checker_finds_the_harm(setup, faults):
    """The guard is needed, and the checker can see what it prevents."""
    with pytest.raises(Counterexample) as caught:
        explore(setup, faults=faults, max_states=400_000, liveness=False)
    assert str(caught.value).startswith("D uses ")
    print(f"\n{caught.value}")


@pytest.mark.parametrize(
    ("setup", "faults", "harm"),
    [
        pytest.param(
            Setup(num_blocks=1, deaf=True, faults=("router cancels",)),
            1,
            "outlives its cancel",
            id="a cancel after the hand-over",
        ),
        pytest.param(
            Setup(num_blocks=2, p_len=3, d_len=9),
            0,
            "which D would go on with",
            id="the request's limit",
        ),
        pytest.param(
            Setup(num_blocks=2, finish="stop", false_end=True, hasty=True),
            0,
            "writes blocks that are free",
            id="blocks of a false end",
        ),
        pytest.param(
            Setup(num_blocks=1, direct=True, imports=mutations.NoWait, faults=("d cancels",)),
            1,
            "writes blocks that are free",
            id="the end of a copy",
        ),
        pytest.param(
            Setup(num_blocks=1, direct=True, tags=mutations.NoClearing),
            0,
            "is free with its tag on",
            id="the clearing of tags",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                direct=True,
                home=Home.SHARED,
                brisk=True,
                tags=mutations.NoSharing,
            ),
            0,
            "is leased without its tag",
            id="the sharing of tags",
        ),
        pytest.param(
            Setup(
                num_keys=2,
                num_blocks=1,
                direct=True,
                home=Home.REUSED,
                brisk=True,
                imports=mutations.HastyBlame,
                faults=("p's deadline",),
            ),
            1,
            "a link is blamed",
            id="P's answer to the tag of another",
        ),
        pytest.param(
            Setup(num_blocks=1, heads=True, imports=mutations.HastyBlame, faults=_LINKS[1:2]),
            1,
            "a link is blamed",
            id="P's answer to the header of another",
        ),
    ],
)
def test_without_a_rule_of_the_engines_the_checker_finds_the_harm(setup, faults, harm):
    """What the engines at both ends do with the tables' word matters as much as the word."""
    with pytest.raises(Counterexample, match=harm) as caught:
        explore(setup, faults=faults, max_states=400_000, liveness=False)
    print(f"\n{caught.value}")
