"""The table of docs/resource.md is what the operator says, and what Argo CD makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lupa
import msgspec
import pytest
from tests.operator.situations import NO_PREFILL, SITUATIONS, UP, serving
from tests.operator.test_judging import OLD, OLD_NAME, decided, inputs

from tandem.operator.api.status import ConditionType, Links, LLMServiceStatus, Reason
from tandem.operator.decide.rollout import Phase
from tandem.operator.decide.status import StatusInputs, next_status
from tandem.operator.desired.naming import Role
from tandem.operator.probes.fleet import links_of

ROOT = Path(__file__).parents[2]
LUA = (ROOT / "manifests/argocd/health.lua").read_text()
SHOWN = ("Ready", "Degraded", "Progressing", "Servable")
HEAD = ("situation", *SHOWN, "others that are not True", "MODE", "Argo CD")
QUIET = {"ScalingActive"}


def health(resource: dict[str, Any]) -> str:
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(resource, recursive=True)
    return str(lua.execute(LUA)["status"])


def as_resource(status: LLMServiceStatus, generation: int = 2) -> dict[str, Any]:
    return {"metadata": {"generation": generation}, "status": msgspec.to_builtins(status)}


def row(situation: str) -> tuple[str, ...]:
    """What is so in a situation, in the table's words."""
    status = next_status(SITUATIONS[situation](), LLMServiceStatus())
    words = {each.type: f"{each.status} {each.reason}" for each in status.conditions}
    others = [
        f"{kind} {said}"
        for kind, said in words.items()
        if kind not in (*SHOWN, *QUIET) and not said.startswith("True")
    ]
    shown = [words[kind] for kind in SHOWN]
    mode = status.mode or "-"
    return (situation, *shown, ", ".join(others) or "-", mode, health(as_resource(status)))


def documented() -> dict[str, tuple[str, ...]]:
    lines = (ROOT / "docs/resource.md").read_text().splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    begin = cells.index(HEAD)
    rows: dict[str, tuple[str, ...]] = {}
    for each in cells[begin + 2 :]:
        if len(each) != len(HEAD):
            break
        rows[each[0]] = each
    return rows


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_situation_is_told_as_documented(situation: str):
    """Each row is what the operator says in that situation, and what Argo CD shows then."""
    assert documented().get(situation) == row(situation)


def test_no_situation_is_documented_that_is_not_tested():
    """The table and the tests have the same rows."""
    assert list(documented()) == list(SITUATIONS)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_conditions_do_not_contradict_each_other(situation: str):
    """Degraded is never Healthy where something was found that does not pass by itself, and Ready
    is never True where requests fail."""
    cells = dict(zip(HEAD, row(situation), strict=True))
    ready, degraded = cells["Ready"].split(), cells["Degraded"].split()
    serious = {"CrashLoop", "ImagePull", "Unschedulable", "PodRefused", "CanaryFailed"}
    if ready[1] in serious:
        assert degraded[0] == "True"
    assert (ready[0] == "True") <= (cells["Servable"].split()[0] == "True")
    assert (cells["Argo CD"] == "Healthy") <= (ready[0] == "True" and degraded[0] == "False")
    if cells["MODE"] == "Disaggregated":
        assert "PrefillReady" not in cells["others that are not True"]


def test_what_no_operator_has_looked_at_is_not_healthy():
    """A service outside the watched namespaces, with no status or an old one, says so."""
    status = next_status(SITUATIONS["serves"](), LLMServiceStatus())
    assert health(as_resource(status)) == "Healthy"
    assert health(as_resource(status, generation=3)) == "Progressing"
    assert health({"metadata": {"generation": 1}}) == "Progressing"


def many_decode(base: StatusInputs, number: int) -> StatusInputs:
    """The same with this many decode workers, of equal names."""
    others = [pod for pod in base.pods if pod.role is not Role.DECODE]
    pods = [pod for pod in base.pods if pod.role is Role.DECODE] * number
    return msgspec.structs.replace(base, pods=others + pods)


def fabric(status: LLMServiceStatus) -> tuple[str, str, str]:
    told = next(each for each in status.conditions if each.type == ConditionType.KV_FABRIC_READY)
    return told.status, told.reason, told.message


@pytest.mark.parametrize("situation", ["suspended", "prefill of a stable service crashes"])
def test_a_count_of_links_does_not_outlive_the_workers(situation: str):
    """Nobody is asked any more who would count anew: the former count is shown nowhere."""
    before = LLMServiceStatus(links=UP)
    status = next_status(SITUATIONS[situation](), before)
    assert status.links == Links(healthy=0, total=0)
    assert status.summary.links == "0/0"
    assert fabric(status)[:2] == ("Unknown", Reason.LINKS_UNKNOWN)
    assert "prefill and decode workers are not ready at the same time" in fabric(status)[2]


def test_a_suspended_service_has_no_links_while_its_pods_go():
    """Pods that were ready a moment ago are not asked any more."""
    asleep = decided(Phase.SUSPENDED, targets=OLD, servable=OLD_NAME)
    status = next_status(inputs(asleep, links=UP), LLMServiceStatus())
    assert (status.links, fabric(status)[0]) == (Links(healthy=0, total=0), "Unknown")


def test_links_of_other_workers_than_now_are_unknown():
    """Until a router has counted those of a worker that has just come."""
    status = next_status(many_decode(serving(), 2), LLMServiceStatus(links=UP))
    assert (status.links, status.summary.links) == (None, "-")
    assert fabric(status)[:2] == ("Unknown", Reason.LINKS_UNKNOWN)
    counted = next_status(many_decode(serving(links=Links(healthy=2, total=2)), 2), status)
    assert (counted.summary.links, fabric(counted)[1]) == ("2/2", Reason.LINKS_UP)


def test_the_fabrics_condition_says_why_links_are_down():
    """The two reasons that most links have, with how many do; numbers make no other reason."""
    slow = "the link gives {} MB/s, 9000.0 are asked"
    reasons = [*map(slow.format, (12, 11, 12)), "no route to host", "gone", "gone"]
    down: list[dict[str, Any]] = [{"state": "down", "reason": each} for each in reasons]
    up = {"state": "up", "reason": ""}
    links = links_of({"workers": [], "handoff_links": [*down, up]}, 7)
    assert links.down == [f"3 x {slow.format(11)}", "2 x gone"]
    status = next_status(many_decode(serving(links=links), 7), LLMServiceStatus())
    told = next(each for each in status.conditions if each.type == ConditionType.KV_FABRIC_READY)
    assert (told.status, told.reason) == ("False", Reason.LINKS_DOWN)
    assert told.message == f"0 of 7 links up; down: 3 x {slow.format(11)}; 2 x gone"


def test_without_prefill_workers_the_fabrics_condition_speaks_of_hand_offs_alone():
    """Decode workers may pull prefixes from each other all the same."""
    status = next_status(serving(wanted=NO_PREFILL, links=None), LLMServiceStatus())
    told = next(each for each in status.conditions if each.type == ConditionType.KV_FABRIC_READY)
    assert (told.status, told.reason) == ("True", Reason.NOT_NEEDED)
    assert told.message == "aggregated serving: there are no hand-offs"


def test_a_reason_of_any_length_fits_the_status():
    """It is cut where the resource's schema would refuse it."""
    down = [{"state": "down", "reason": "y" * 1000}]
    (told,) = links_of({"workers": [], "handoff_links": down}, 1).down
    assert len(told) == 253
