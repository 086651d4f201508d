"""Links of a service's status are what a router says of its fleet (``/debug/fleet``)."""

from __future__ import annotations

from queue import Queue

import pytest
from tests.operator.test_judging import question
from tests.operator.test_probing import KEY, router, whole

from tandem.operator.api.status import Links
from tandem.operator.probes.fleet import links_of, read_links, steadied
from tandem.operator.probes.probing import Probes

P, D, E = "p" * 32, "d" * 32, "e" * 32
BAD = {"prefill": P, "decode": D, "cause": "digest"}


def worker(incarnation: str, pod: str, **peers: bool) -> dict[str, object]:
    """A worker as a router tells it."""
    return {"incarnation": incarnation, "pod": pod, "peers": peers}


@pytest.mark.parametrize("is_up", [True, False])
def test_a_quarantined_link_is_counted_once(is_up: bool):
    """Also while its decode worker calls it down: the other decode worker's link is up."""
    workers = [worker(P, "p-0"), worker(D, "d-0", **{P: is_up}), worker(E, "d-1", **{P: True})]
    links = links_of({"workers": workers, "quarantined": [BAD]}, 2)
    assert (links.healthy, links.total) == (1, 2)


def test_a_quarantined_link_is_named_by_its_pods():
    """What a router found by no cluster's word is named by its incarnation."""
    workers = [worker(P, "demo-prefill-1"), worker(D, "demo-decode-1"), worker(E, "")]
    closed = [BAD, {**BAD, "decode": E}]
    links = links_of({"workers": workers, "quarantined": closed}, 2)
    assert links.quarantined == [
        "demo-prefill-1 to demo-decode-1: digest",
        f"demo-prefill-1 to {E}: digest",
    ]


def test_names_of_any_length_fit_the_status():
    """They are cut where the resource's schema would refuse them."""
    workers = [worker(P, "p" * 200), worker(D, "d" * 200)]
    (told,) = links_of({"workers": workers, "quarantined": [BAD]}, 1).quarantined
    assert len(told) == 253


@pytest.mark.parametrize(
    ("rates", "median"),
    [([1.0, 2.0], 1500), ([0.0, 0.25, 0.0], 250), ([0.0001], 1), ([0.0], None), ([], None)],
)
def test_the_rate_of_the_middle_link_is_told(rates: list[float], median: int | None):
    links = links_of({"handoff_links": [{"state": "up", "gb_per_s": each} for each in rates]}, 2)
    assert links.median_megabytes_per_second == median


def test_a_rate_that_moves_a_little_changes_no_status():
    """Nothing is written, and nobody woken, as long as it stays within a fifth."""
    before = Links(healthy=1, total=1, median_megabytes_per_second=1000)
    for rate, shown in ((1100, 1000), (801, 1000), (1201, 1201), (799, 799), (None, None)):
        links = Links(healthy=1, total=1, median_megabytes_per_second=rate)
        assert steadied(links, before).median_megabytes_per_second == shown
        assert steadied(links, None) is links


def test_a_rate_that_moves_a_little_is_not_taken_up():
    """What is known of a service keeps the rate that was told."""
    woken: Queue[tuple[str, str]] = Queue()
    probes = Probes(60.0, woken.put)
    known = probes.known(KEY)
    known.links = before = Links(healthy=0, total=1, median_megabytes_per_second=500)
    with router(whole({"handoff_links": [{"state": "up", "gb_per_s": 0.55}]})) as (port, _):
        probes.poll(KEY, [question(port, "r")], about={"r"}, links=1)
        assert woken.get(timeout=20) == KEY
    assert known.links == before
    probes.close()


def test_what_a_router_says_in_full_is_read():
    """Over HTTP, with every part that the status shows."""
    said = {
        "workers": [worker(P, "p-0"), worker(D, "d-0", **{P: True})],
        "transport": "tcp",
        "quarantined": [],
        "handoff_links": [{"state": "up", "reason": "", "gb_per_s": 0.5}],
    }
    with router(whole(said)) as (port, _):
        links = read_links(f"http://127.0.0.1:{port}", 1, "token")
    assert links == Links(healthy=1, total=1, transport="tcp", median_megabytes_per_second=500)
