"""A service as a rollout sees it, in virtual time: pods that load, crash, leave and find no node.

``decide`` is asked every ten seconds and obeyed. Who serves is judged by pods alone: a ready router
that the Service reaches, and a ready decode worker of its model that was admitted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.decide.answered import RevisionView, RoleView, RolloutView
from tandem.operator.decide.rollout import Decision, Phase, decide
from tandem.operator.desired.naming import Role

LOOK = 10.0
"""Seconds between two looks."""
_PATIENCE = 60.0


@dataclass(frozen=True)
class Spec:
    """What somebody may ask for; ``bad`` answers no canary."""

    model: str = "a"
    prefill: int = 0
    decode: int = 0
    router: int = 0
    bad: bool = False

    def targets(self) -> dict[Role, str]:
        """Revisions, each role's of its own; the first letter is the model."""
        worker = f"{self.model}{'bad' if self.bad else ''}"
        return {
            Role.PREFILL: f"{worker}{self.prefill}",
            Role.DECODE: f"{worker}{self.decode}",
            Role.ROUTER: f"{self.model}{self.router}",
        }


@dataclass(eq=False)
class SimPod:
    """A pod: on a node or not, loading for some looks, then ready."""

    role: Role
    revision: str
    pending: float | None
    """Since when it has no node."""
    loads: int
    leaves: int | None = None
    """Looks until it is gone, once it was deleted."""
    admitted: bool = False

    @property
    def ready(self) -> bool:
        return self.pending is None and self.loads == 0 and self.leaves is None


@dataclass
class Sim:
    desired: dict[Role, int]
    room: dict[Role, int]
    """Nodes' places by role."""
    random: random.Random
    spec: Spec = field(default_factory=Spec)
    surge: Surge = Surge.AUTO
    paused: bool = False
    suspended: bool = False
    now: float = 1_800_000_000.0
    memory: RolloutStatus = field(default_factory=RolloutStatus)
    asked: dict[tuple[Role, str], int] = field(default_factory=dict)
    pods: list[SimPod] = field(default_factory=list)
    reached: str | None = None
    """Revision of routers that the Service selects; None for all."""

    def look(self) -> Decision:
        decision = decide(self.view())
        self.memory, self.reached = decision.memory, decision.routers
        wanted = decision.counts.items()
        self.asked = {key: count for key, count in wanted if count or self._of(key)}
        for pod in self.pods:
            pod.admitted |= (pod.role, pod.revision) in decision.admitted
        for key, count in wanted:
            self._scale(key, count)
        return decision

    def view(self) -> RolloutView:
        targets = self.spec.targets()
        return RolloutView(
            roles={role: self._role(role, target) for role, target in targets.items()},
            memory=self.memory,
            now=self.now,
            canary_ok=self._is_right(targets),
            suspended=self.suspended,
            paused=self.paused,
            surge=self.surge,
        )

    def _role(self, role: Role, target: str) -> RoleView:
        seen = {
            name: RevisionView(
                asked=count,
                ready=sum(pod.ready for pod in self._of((role, name))),
                present=len(self._of((role, name))),
                unschedulable=any(
                    pod.pending is not None and self.now - pod.pending >= _PATIENCE
                    for pod in self._of((role, name))
                    if pod.leaves is None
                ),
            )
            for (its, name), count in self.asked.items()
            if its is role
        }
        return RoleView(desired=self.desired[role], target=target, revisions=seen)

    def _of(self, key: tuple[Role, str]) -> list[SimPod]:
        return [pod for pod in self.pods if (pod.role, pod.revision) == key]

    def _is_right(self, targets: dict[Role, str]) -> bool:
        if self.spec.bad:
            return False
        needed = [key for key in targets.items() if self.desired[key[0]]]
        return all(any(pod.ready for pod in self._of(key)) for key in needed)

    def _scale(self, key: tuple[Role, str], count: int) -> None:
        mine = [pod for pod in self._of(key) if pod.leaves is None]
        mine.sort(key=lambda pod: (pod.pending is None, pod.ready))
        for pod in mine[: max(0, len(mine) - count)]:
            pod.leaves = 0 if pod.pending is not None else self.random.randint(0, 3)
        for _ in range(count - len(mine)):
            self.pods.append(SimPod(*key, pending=self.now, loads=self.random.randint(1, 4)))
        self.pods = [pod for pod in self.pods if pod.leaves != 0]

    def tick(self) -> None:
        """Ten seconds: pods leave, find nodes, load."""
        self.now += LOOK
        for pod in self.pods:
            if pod.leaves is not None:
                pod.leaves -= 1
            elif pod.pending is None and pod.loads:
                pod.loads -= 1
        self.pods = [pod for pod in self.pods if pod.leaves is None or pod.leaves > 0]
        for pod in self.pods:
            used = sum(its.role is pod.role and its.pending is None for its in self.pods)
            if pod.pending is not None and used < self.room[pod.role]:
                pod.pending = None

    def crash(self) -> None:
        """A pod that is ready has to load once more."""
        up = [pod for pod in self.pods if pod.ready]
        if up:
            self.random.choice(up).loads = 2

    def serves(self) -> bool:
        return any(
            router.revision[0] == worker.revision[0]
            for router in self.pods
            if router.role is Role.ROUTER
            and router.ready
            and self.reached in (None, router.revision)
            for worker in self.pods
            if worker.role is Role.DECODE and worker.ready and worker.admitted
        )

    def is_settled(self, decision: Decision) -> bool:
        """Whether all pods are those of one set, ready, and nothing is on its way."""
        sets = decision.memory.stable if decision.phase is Phase.FAILED else self.spec.targets()
        wanted = {(Role(role), name): self.desired[Role(role)] for role, name in sets.items()}
        left = {key: count for key, count in decision.counts.items() if count}
        return left == {key: count for key, count in wanted.items() if count} and all(
            pod.ready for pod in self.pods
        )
