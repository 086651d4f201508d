"""Whether the model is there and fits the spec, from what its Job reported. Pure.

The Job's container (``tandem prepare``) writes one JSON object as its termination message. Called
by ``reconcile``.
"""

from __future__ import annotations

import msgspec

from tandem.operator.api.conditions import Reason
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import ModelStatus
from tandem.operator.desired.model import Delivery, delivery
from tandem.operator.desired.naming import WORKERS
from tandem.operator.desired.policy import worker_role
from tandem.operator.observe import JobView


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the Job's container found."""

    ok: bool
    reason: str = ""
    """With ok false: ModelNotFound, ModelUnsupported or FetchFailed."""
    message: str = ""
    revision: str | None = None
    """Commit of a hub source."""
    fingerprint: str | None = None
    bytes: int | None = None
    architecture: str = ""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    max_model_len: int | None = None


class ModelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The ModelReady condition, and what is pinned."""

    ready: bool
    reason: Reason
    message: str
    status: ModelStatus
    may_start: bool
    """Pods may be made now: the files are there, or come to each pod by itself."""


def judge(
    spec: LLMServiceSpec, job: JobView | None, before: ModelStatus, missing: str | None
) -> ModelVerdict:
    """Verdict; ``missing`` names a Secret or claim that is not there, as ``Reason: message``."""
    where = delivery(spec)
    pinned = before if before.requested == where.digest else ModelStatus(requested=where.digest)
    if missing is not None:
        reason, _, message = missing.partition(": ")
        return _no(Reason(reason), message, pinned, where)
    if where.in_pods:
        text = "each pod fetches the model for itself"
        return ModelVerdict(
            ready=True, reason=Reason.NOT_NEEDED, message=text, status=pinned, may_start=True
        )
    report = _report(job)
    if report is None and pinned.fingerprint is not None:
        return _yes(spec, pinned, where)
    if report is None:
        return _waiting(job, pinned, where)
    if not report.ok:
        return _no(_reason(report), report.message, pinned, where)
    problem = misfit(spec, report)
    status = _pin(pinned, report)
    if problem is not None:
        return _no(Reason.MODEL_MISMATCH, problem, status, where)
    return _yes(spec, status, where)


def _pin(pinned: ModelStatus, report: Report) -> ModelStatus:
    return ModelStatus(
        requested=pinned.requested,
        resolved_revision=pinned.resolved_revision or report.revision,
        digest=pinned.digest or report.fingerprint,
        fingerprint=report.fingerprint,
        bytes=report.bytes,
    )


def _report(job: JobView | None) -> Report | None:
    if job is None or job.report is None or not (job.succeeded or job.failed):
        return None
    try:
        return msgspec.json.decode(job.report.strip().splitlines()[-1], type=Report)
    except (msgspec.MsgspecError, IndexError):
        return None if job.succeeded else Report(ok=False, message=job.report[-800:])


def _reason(report: Report) -> Reason:
    known = {Reason.MODEL_NOT_FOUND, Reason.MODEL_UNSUPPORTED, Reason.FETCH_FAILED}
    return next((each for each in known if each == report.reason), Reason.FETCH_FAILED)


def _waiting(job: JobView | None, status: ModelStatus, where: Delivery) -> ModelVerdict:
    if job is not None and job.failed:
        said = job.problem.message if job.problem else "the Job failed without a report"
        return _no(Reason.FETCH_FAILED, said, status, where)
    if job is not None and job.problem is not None:
        return _no(job.problem.reason, job.problem.message, status, where)
    if where.source is None:
        return _no(Reason.CHECKING, "reading the model's files", status, where)
    return _no(Reason.FETCHING, f"fetching {where.source}", status, where)


def _yes(spec: LLMServiceSpec, status: ModelStatus, where: Delivery) -> ModelVerdict:
    size = "" if status.bytes is None else f", {status.bytes / 1e9:.2f} GB"
    text = f"{spec.model.name} is at {where.path}{size}"
    return ModelVerdict(
        ready=True, reason=Reason.MODEL_READY, message=text, status=status, may_start=True
    )


def _no(reason: Reason, message: str, status: ModelStatus, where: Delivery) -> ModelVerdict:
    """Not ready. Pods whose files are mounted start all the same, beside the check, unless the
    check has said that they cannot work."""
    hopeless = {Reason.CLAIM_NOT_FOUND, Reason.MODEL_MISMATCH, Reason.MODEL_UNSUPPORTED}
    hopeless |= {Reason.MODEL_NOT_FOUND, Reason.SECRET_NOT_FOUND}
    may_start = where.source is None and reason not in hopeless
    return ModelVerdict(
        ready=False, reason=reason, message=message, status=status, may_start=may_start
    )


def misfit(spec: LLMServiceSpec, report: Report) -> str | None:
    """Why the spec does not fit the model, naming the field, or None."""
    longest, asked = report.max_model_len, spec.engine.max_model_len
    if longest is not None and asked is not None and asked > longest:
        return f"spec.engine.maxModelLen: {asked}; the model was made for {longest} at most"
    for role in WORKERS:
        tensor = worker_role(spec, role).parallelism.tensor or 1
        for name, heads in (("heads", report.num_heads), ("KV heads", report.num_kv_heads)):
            if heads is not None and heads % tensor:
                return (
                    f"spec.{role}.parallelism.tensor: {tensor} does not divide the model's "
                    f"{heads} {name}"
                )
    return None
