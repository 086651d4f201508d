"""Situations of a service as ``status`` sees them, by the words of docs/resource.md's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tests.operator.test_judging import NEW_NAME, OLD, OLD_NAME, decided, inputs, verdict

from tandem.operator.api.service import Task
from tandem.operator.api.status import Links, ModelStatus, Reason
from tandem.operator.decide.modelcheck import ModelVerdict
from tandem.operator.decide.observe import Problem
from tandem.operator.decide.rollout import Phase
from tandem.operator.decide.scaling import Wanted
from tandem.operator.decide.status import StatusInputs
from tandem.operator.desired.naming import Role

GOOD = verdict(OLD_NAME, Reason.CANARY_OK, "came back")
UP = Links(healthy=1, total=1, transport="nixl")
STABLE = decided(Phase.STABLE, targets=OLD, servable=OLD_NAME)
FIRST = decided(Phase.FIRST, targets=OLD, stable={})


def serving(**more: Any) -> StatusInputs:
    return inputs(STABLE, **{"canary": GOOD, "links": UP, **more})


def down(base: StatusInputs, *roles: Role, problem: Problem | None = None) -> StatusInputs:
    """The same with pods of these roles not ready, for a reason."""
    pods = [
        msgspec.structs.replace(pod, ready=False, problem=problem) if pod.role in roles else pod
        for pod in base.pods
    ]
    return msgspec.structs.replace(base, pods=pods)


def first(**more: Any) -> StatusInputs:
    return inputs(FIRST, **more)


def model(reason: Reason, *, non_retryable: bool = False) -> ModelVerdict:
    return ModelVerdict(
        ready=False,
        reason=reason,
        message="the model",
        status=ModelStatus(),
        may_start=False,
        non_retryable=non_retryable,
    )


def gone(base: StatusInputs) -> StatusInputs:
    return msgspec.structs.replace(base, pods=[])


def embedding() -> StatusInputs:
    base = serving(wanted=NO_DECODE, links=None)
    workers = [pod for pod in base.pods if pod.role is not Role.DECODE]
    spec = msgspec.structs.replace(base.spec, task=Task.EMBED)
    return msgspec.structs.replace(base, pods=workers, spec=spec)


CRASH = Problem(Reason.CRASH_LOOP, "container main exits 1")
NOWHERE = Problem(Reason.UNSCHEDULABLE, "0/2 nodes")
PULL = Problem(Reason.IMAGE_PULL, "no such image")
FAILED = verdict(OLD_NAME, Reason.CANARY_FAILED, "HTTP 503")
FELL_BACK = verdict(OLD_NAME, Reason.CANARY_NOT_DISAGGREGATED, "not over KV")
NO_PREFILL = {role: Wanted(replicas=0 if role is Role.PREFILL else 1) for role in Role}
NO_DECODE = {role: Wanted(replicas=0 if role is Role.DECODE else 1) for role in Role}
WORKERS_AND_ROUTER = tuple(Role)

SITUATIONS: dict[str, Callable[[], StatusInputs]] = {
    "serves": serving,
    "serves, aggregated as asked": lambda: serving(wanted=NO_PREFILL),
    "serves vectors, as asked": lambda: embedding(),
    "serves vectors, its prefill crashes": lambda: down(embedding(), Role.PREFILL, problem=CRASH),
    "the first revision loads": lambda: down(first(), *WORKERS_AND_ROUTER),
    "the model is fetched": lambda: gone(first(model=model(Reason.FETCHING))),
    "the model's turn has not come": lambda: gone(first(model=model(Reason.QUEUED))),
    "the model is not there": lambda: gone(
        first(model=model(Reason.MODEL_NOT_FOUND, non_retryable=True))
    ),
    "the first revision's prefill crashes": lambda: down(
        first(links=UP), Role.PREFILL, problem=CRASH
    ),
    "the first revision's routers find no image": lambda: down(first(), Role.ROUTER, problem=PULL),
    "routers have keys that workers refuse": lambda: down(
        first(refusals={Role.ROUTER: Problem(Reason.KEYS_REFUSED, "keys do not fit")}),
        Role.ROUTER,
    ),
    "routers and workers are of two wires": lambda: down(
        first(refusals={Role.ROUTER: Problem(Reason.WIRE_REFUSED, "another protocol")}),
        Role.ROUTER,
    ),
    "the first revision finds no node": lambda: down(first(), Role.DECODE, problem=NOWHERE),
    "the first question was answered wrong": lambda: first(canary=FAILED, links=UP),
    "prefill is gone from a stable service": lambda: down(serving(), Role.PREFILL),
    "prefill of a stable service crashes": lambda: down(serving(), Role.PREFILL, problem=CRASH),
    "decode is gone from a stable service": lambda: down(serving(), Role.DECODE),
    "KV links are down": lambda: serving(links=Links(healthy=0, total=1)),
    "answers come from decode alone": lambda: serving(canary=FELL_BACK),
    "the service is full, and the canary waits": lambda: first(
        canary=verdict(OLD_NAME, Reason.CANARY_QUEUED, "HTTP 429"), links=UP
    ),
    "the canary fails": lambda: serving(canary=FAILED),
    "a new revision is tried": lambda: inputs(decided(Phase.PILOT), canary=GOOD, links=UP),
    "a new revision's canary fails": lambda: inputs(
        decided(Phase.PILOT),
        canary=GOOD,
        links=UP,
        pilot=verdict(NEW_NAME, Reason.CANARY_FAILED, "HTTP 503"),
    ),
    "a new revision was given up": lambda: inputs(decided(Phase.FAILED), canary=GOOD, links=UP),
    "the spec is refused, nothing served": lambda: gone(
        first(accepted=("False", Reason.UNSUPPORTED, "not supported"))
    ),
    "the spec is refused, the former serves": lambda: serving(
        accepted=("False", Reason.UNSUPPORTED, "not supported")
    ),
    "a name is taken": lambda: gone(
        first(accepted=("False", Reason.NAME_TAKEN, "Service demo is there already"))
    ),
    "the rollout is paused": lambda: inputs(
        decided(Phase.PAUSED, targets=OLD, servable=OLD_NAME), canary=GOOD, links=UP
    ),
    "new keys are being read": lambda: serving(key_wait=30.0),
    "suspended": lambda: gone(
        inputs(decided(Phase.SUSPENDED, targets=OLD, servable=OLD_NAME), links=UP)
    ),
    "suspended before it ever started": lambda: gone(
        inputs(decided(Phase.SUSPENDED, targets=OLD, stable={}), model=model(Reason.SUSPENDED))
    ),
}
