"""Several routers, one set of prefill workers."""

from tandem.protocol.ids import new_incarnation
from tandem.worker.handoff import PeerSets


def test_links_are_the_union_of_what_routers_say() -> None:
    """No router can take away a link that another one wants."""
    one, two = new_incarnation(), new_incarnation()
    p, q = new_incarnation(), new_incarnation()
    sets = PeerSets()

    assert sets.add(one, {"a:1": p}) == {"a:1": p}
    assert sets.add(two, {"b:2": q}) == {"a:1": p, "b:2": q}
    assert sets.add(one, {}) == {"b:2": q}


def test_a_router_that_went_says_nothing_any_more() -> None:
    """The next word of any router drops what only the lost one wanted."""
    one, two = new_incarnation(), new_incarnation()
    p, q = new_incarnation(), new_incarnation()
    sets = PeerSets()
    sets.add(one, {"a:1": p})
    sets.forget(one)

    assert sets.add(two, {"b:2": q}) == {"b:2": q}
