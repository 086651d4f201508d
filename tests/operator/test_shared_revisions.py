"""Sets of revisions that share some of a role's: what is one's own, who is met, what stays."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from tests.operator.test_rollout import NOW, counts, seen

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.decide.answered import RevisionView, RoleView, RolloutView
from tandem.operator.decide.rollout import Decision, Phase, decide
from tandem.operator.desired.naming import Role
from tandem.operator.desired.revision import service_revision

STABLE = {"prefill": "p0", "decode": "d0", "router": "r0"}
PREFILL = {"p0": seen(4, present=4)}
Seen = dict[str, RevisionView]


def roles_of(targets: dict[str, str], **views: tuple[int, Seen]) -> dict[Role, RoleView]:
    return {
        Role(role): RoleView(desired=desired, target=targets[role], revisions=revisions)
        for role, (desired, revisions) in views.items()
    }


def left(second: dict[str, str], decode: Seen, router: Seen) -> RolloutView:
    """Targets that answered, and now share all but their prefill workers with the spec's."""
    return RolloutView(
        roles=roles_of(
            {**second, "prefill": "p2"},
            prefill=(4, PREFILL),
            decode=(4, decode),
            router=(2, router),
        ),
        memory=RolloutStatus(targets=second, stable=STABLE, servable=service_revision(second)),
        now=NOW,
    )


def obeyed(view: RolloutView, decision: Decision, **failed: str) -> RolloutView:
    """The next look: nothing new is ready yet, and what leaves is gone but for old routers."""

    def after(role: Role, each: RoleView) -> Mapping[str, RevisionView]:
        return {
            name: seen(count, min(count, before.ready), present=max(count, before.present))
            for (its, name), count in decision.counts.items()
            if its is role
            for before in [each.of(name)]
        }

    return msgspec.structs.replace(
        view,
        roles={
            role: msgspec.structs.replace(each, revisions=after(role, each))
            for role, each in view.roles.items()
        },
        memory=msgspec.structs.replace(decision.memory, **failed),
        now=view.now + 10,
    )


def test_workers_that_the_next_targets_share_serve_on():
    """Decode has rolled to three of four; then prefill alone changes."""
    second = {**STABLE, "decode": "d1"}
    view = left(second, {"d0": seen(1, present=1), "d1": seen(3, present=3)}, {"r0": seen(2)})
    for _ in range(3):
        decision = decide(view)
        assert decision.memory.served == [second]
        assert (counts(decision)["d:d0"], counts(decision)["d:d1"]) == (2, 3)
        assert (Role.DECODE, "d1") in decision.admitted
        view = obeyed(view, decision)


def test_routers_that_the_next_targets_share_are_reached():
    """Only draining pods are left of the others."""
    second = {**STABLE, "router": "r1"}
    routers = {"r0": seen(0, present=1), "r1": seen(2, present=2)}
    view = left(second, {"d0": seen(4, present=4)}, routers)
    for _ in range(3):
        decision = decide(view)
        assert decision.routers in (None, "r1")
        assert counts(decision)["r:r1"] == 2
        view = obeyed(view, decision)


def test_workers_that_failed_targets_share_stay_until_others_are_there():
    """All of decode had rolled when the next targets, which share it, fail."""
    second = {**STABLE, "decode": "d1"}
    view = left(second, {"d0": seen(0), "d1": seen(4, present=4)}, {"r0": seen(2, present=2)})
    token = service_revision({**second, "prefill": "p2"})
    decision = decide(obeyed(view, decide(view), failed=token))
    assert decision.phase is Phase.FAILED
    assert counts(decision)["d:d1"] == 4
    assert counts(decision)["p:p2"] == 0


@pytest.mark.parametrize("is_resumed", [False, True])
def test_routers_of_which_none_is_ready_are_not_reached(is_resumed: bool):
    """All three roles change, and the only new router is not ready, while old ones are: in the
    middle of a rollout, and after a suspension in which the new workers load faster."""
    targets = {"prefill": "p1", "decode": "d1", "router": "r1"}
    old = seen(2, 0) if is_resumed else seen(0)
    roles = roles_of(
        targets,
        prefill=(1, {"p0": old, "p1": seen(1)}),
        decode=(2, {"d0": old, "d1": seen(1 if is_resumed else 2)}),
        router=(3, {"r0": seen(3), "r1": seen(1, 0)}),
    )
    memory = RolloutStatus(targets=targets, stable=STABLE, servable=service_revision(targets))
    assert decide(RolloutView(roles=roles, memory=memory, now=NOW)).routers in (None, "r0")


@pytest.mark.parametrize("has_failed", [False, True])
def test_who_is_met_keeps_workers(has_failed: bool):
    """Two models whose sets have as many routers and decode workers: one has a prefill worker
    besides, so that clients meet it, and so its last decode worker stays; whether third targets
    are to come or were taken back."""
    stable = {"prefill": "ap0", "decode": "ad1", "router": "ar0"}
    other = {"prefill": "bp1", "decode": "bd1", "router": "br0"}
    targets = {**stable, "prefill": "ap1", "router": "ar1"}
    roles = roles_of(
        targets,
        prefill=(1, {"ap0": seen(0), "bp1": seen(1, present=1)}),
        decode=(2, {"ad1": seen(1, present=1), "bd1": seen(1, present=1)}),
        router=(2, {"ar0": seen(1, present=1), "br0": seen(1, present=1)}),
    )
    memory = RolloutStatus(targets=other, stable=stable, servable=service_revision(other))
    if has_failed:
        failed = service_revision(targets)
        memory = RolloutStatus(targets=targets, stable=stable, served=[other], failed=failed)
    decision = decide(RolloutView(roles=roles, memory=memory, now=NOW, surge=Surge.NEVER))
    reached = [each for each in (stable, other) if decision.routers in (None, each["router"])]
    assert any(decision.counts[(Role.DECODE, each["decode"])] > 0 for each in reached)
    assert decision.met in reached
