"""Tenants that wait are served at the same rate; one tenant keeps its order."""

from __future__ import annotations

import heapq

from tandem.base.fair_order import FairOrder


def served(arrivals: list[tuple[str, int]]) -> list[str]:
    """Tenants in the order in which work that came together is served."""
    order = FairOrder()
    heap: list[tuple[int, int, str]] = []
    for number, (tenant, cost) in enumerate(arrivals):
        heapq.heappush(heap, (order.enter(tenant, cost), number, tenant))
    found = []
    while heap:
        start, _, tenant = heapq.heappop(heap)
        order.begin(start)
        found.append(tenant)
    return found


def test_one_tenant_keeps_the_order_of_arrival() -> None:
    """Whatever its work costs, and whatever it is charged later."""
    order = FairOrder()
    tags = []
    for cost in (5, 1, 900, 1, 30):
        tags.append(order.enter("a", cost))
        order.begin(tags[0])
        order.charge("a", 17)
    assert tags == sorted(tags)
    assert len(set(tags)) == len(tags)


def test_tenants_take_turns_however_much_one_of_them_asks_for() -> None:
    """The last to come waits for one of the others' work, not for all."""
    assert served([("a", 1)] * 6 + [("b", 1)] * 3) == ["a", "b", "a", "b", "a", "b", "a", "a", "a"]


def test_turns_are_weighted_by_cost() -> None:
    """Ten small pieces of work cost as much as one that is ten times as large."""
    order = served([("large", 10)] * 3 + [("small", 1)] * 20)
    assert order[:12].count("small") == 10


def test_a_tenant_that_was_idle_has_saved_nothing() -> None:
    """It begins where the queue is."""
    order = FairOrder()
    for _ in range(5):
        order.begin(order.enter("a", 100))
    assert order.enter("b", 100) == 400
    assert order.enter("b", 100) == 500
