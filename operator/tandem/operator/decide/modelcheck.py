"""Verdict on the model from its Job's report: it exists and fits the spec, or not.

The report is the termination message of ``tandem prepare``, in JSON.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import ModelStatus, Reason
from tandem.operator.decide.observe import JobView
from tandem.operator.desired.model import Delivery, delivery
from tandem.operator.desired.naming import WORKERS
from tandem.operator.desired.policy import worker_role

_NON_RETRYABLE = {
    Reason.CLAIM_NOT_FOUND,
    Reason.MODEL_MISMATCH,
    Reason.MODEL_NOT_FOUND,
    Reason.MODEL_UNSUPPORTED,
    Reason.SECRET_NOT_FOUND,
}
_WAITS = {
    Reason.SUSPENDED: "the model is read when the service is no longer suspended",
    Reason.QUEUED: "models of other services are being fetched or read; this one is queued",
}


def may_have_job(
    job: JobView | None,
    *,
    suspended: bool,
    others: Callable[[], int],
    most: int,
    made_of: str | None = None,
) -> Reason | None:
    """Return None if the model's Job may exist, else the reason to wait.

    ``made_of`` is the revision of its pods: an older Job that has not begun, or has failed, is
    replaced. ``others`` counts running Jobs of all services. A suspension deletes a running Job; an
    ended one stays.
    """
    report = _report(job)
    found = report is not None and report.ok
    ended = job is not None and (job.succeeded or job.failed or found)
    if suspended:
        return None if ended else Reason.SUSPENDED
    if job is not None and job.made_of != made_of and not (job.succeeded or found):
        return Reason.QUEUED if job.failed or not job.has_begun else None
    return None if job is not None or others() < most else Reason.QUEUED


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Report of the Job's container."""

    ok: bool
    reason: str = ""
    """ModelNotFound, ModelUnsupported or FetchFailed if ``ok`` is false."""
    message: str = ""
    revision: str | None = None
    """Commit of a hub source."""
    fingerprint: str | None = None
    bytes: int | None = None
    architecture: str = ""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    max_model_len: int | None = None


_reports = msgspec.json.Decoder(Report)  # built once: threads must not do it at the same time


class ModelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The ModelReady condition, and the pinned revision."""

    ready: bool
    reason: Reason
    message: str
    status: ModelStatus
    may_start: bool
    """Whether pods may be made: the files exist, or pods fetch them."""
    non_retryable: bool = False
    """Whether a person must change something."""


def judge(
    spec: LLMServiceSpec,
    job: JobView | None,
    before: ModelStatus,
    missing: str | None,
    *,
    waits: Reason | None = None,
    now: float = 0.0,
    patience: float = 60.0,
) -> ModelVerdict:
    """Return the verdict; ``missing`` names an absent Secret or claim.

    ``waits`` is the reason for no Job. A Job without a started pod after ``patience`` seconds is
    reported.
    """
    where = delivery(spec)
    pinned = before if before.requested == where.digest else ModelStatus(requested=where.digest)
    if missing is not None:
        reason, _, message = missing.partition(": ")
        return _no(Reason(reason), message, pinned, where)
    if where.in_pods:
        text = "each pod fetches its own copy of the model"
        return ModelVerdict(
            ready=True, reason=Reason.NOT_NEEDED, message=text, status=pinned, may_start=True
        )
    report = _report(job)
    if report is None and pinned.fingerprint is not None:
        return _known(spec, pinned, where)
    if report is None and waits is not None:
        return _no(waits, _WAITS[waits], pinned, where)
    if report is None:
        return _waiting(job, pinned, where, now - patience)
    if not report.ok:
        return _refused(spec, job, report, pinned, where)
    return _known(spec, _pin(pinned, report), where)


def _pin(pinned: ModelStatus, report: Report) -> ModelStatus:
    return ModelStatus(
        requested=pinned.requested,
        resolved_revision=pinned.resolved_revision or report.revision,
        digest=pinned.digest or report.fingerprint,
        fingerprint=report.fingerprint,
        bytes=report.bytes,
        max_model_len=report.max_model_len,
        num_heads=report.num_heads,
        num_kv_heads=report.num_kv_heads,
    )


def _report(job: JobView | None) -> Report | None:
    """Return the report of the last attempt; a crash is none while the Job retries."""
    if job is None or job.report is None:
        return None
    try:
        return _reports.decode(job.report.strip().splitlines()[-1])
    except (msgspec.MsgspecError, IndexError):
        return Report(ok=False, message=job.report[-800:]) if job.failed else None


def _reason(report: Report) -> Reason:
    known = {Reason.MODEL_NOT_FOUND, Reason.MODEL_UNSUPPORTED, Reason.FETCH_FAILED}
    return next((each for each in known if each == report.reason), Reason.FETCH_FAILED)


def _refused(
    spec: LLMServiceSpec, job: JobView | None, report: Report, status: ModelStatus, where: Delivery
) -> ModelVerdict:
    """Return the verdict on a failure, at once if the model is absent or unsupported."""
    assert job is not None
    source = spec.model.source.type
    field = f"spec.model.source.{source[0].lower()}{source[1:]}"
    reason, message = _reason(report), report.message.rstrip(".")
    if reason is Reason.MODEL_NOT_FOUND:
        text = f"{message}. Correct {field}; or put the model there and delete Job {job.name}"
    elif reason is Reason.MODEL_UNSUPPORTED:
        text = f"{message}. Choose another model in {field}"
    elif job.failed:
        text = f"{message}. Read the log of Job {job.name}; delete it to try again"
        return _no(reason, text, status, where, given_up=where.source is not None)
    else:
        waiting = Reason.CHECKING if where.source is None else Reason.FETCHING
        return _no(waiting, f"Job {job.name} tries again after: {message}", status, where)
    return _no(reason, text, status, where)


def _waiting(
    job: JobView | None, status: ModelStatus, where: Delivery, long_ago: float
) -> ModelVerdict:
    if job is not None and job.failed:
        message = job.problem.message if job.problem else "it ended without a report"
        text = f"Job {job.name} failed: {message}. Read its log; delete it to try again"
        return _no(Reason.FETCH_FAILED, text, status, where, given_up=where.source is not None)
    if job is not None and job.problem is not None:
        return _no(job.problem.reason, job.problem.message, status, where)
    if job is not None and job.podless_since is not None and job.podless_since < long_ago:
        text = f"Job {job.name} has no pod; see `kubectl describe job {job.name}`"
        return _no(Reason.JOB_STUCK, text, status, where)
    if job is not None and job.waiting is not None and job.waiting[1] < long_ago:
        pod = job.waiting[0]
        text = f"pod {pod} of Job {job.name} does not start; see `kubectl describe pod {pod}`"
        return _no(Reason.JOB_STUCK, text, status, where)
    if where.source is None:
        return _no(Reason.CHECKING, "reading the model's files", status, where)
    return _no(Reason.FETCHING, f"fetching {where.source}", status, where)


def _known(spec: LLMServiceSpec, status: ModelStatus, where: Delivery) -> ModelVerdict:
    """Return the verdict on a model that was read, from the status."""
    problem = misfit(spec, status)
    if problem is not None:
        return _no(Reason.MODEL_MISMATCH, problem, status, where)
    size = "" if status.bytes is None else f", {status.bytes / 1e9:.2f} GB"
    text = f"{spec.model.name} is at {where.path}{size}"
    return ModelVerdict(
        ready=True, reason=Reason.MODEL_READY, message=text, status=status, may_start=True
    )


def _no(
    reason: Reason,
    message: str,
    status: ModelStatus,
    where: Delivery,
    *,
    given_up: bool = False,
) -> ModelVerdict:
    """Return a verdict of not ready.

    Pods with mounted files start during the check.
    """
    non_retryable = reason in _NON_RETRYABLE or given_up
    return ModelVerdict(
        ready=False,
        reason=reason,
        message=message,
        status=status,
        may_start=where.source is None and not non_retryable,
        non_retryable=non_retryable,
    )


def misfit(spec: LLMServiceSpec, model: ModelStatus) -> str | None:
    """Return the field of the spec that does not fit the model, and why, or None."""
    longest, asked = model.max_model_len, spec.engine.max_model_len
    if longest is not None and asked is not None and asked > longest:
        return f"spec.engine.maxModelLen: {asked}; the model was made for {longest} at most"
    for role in WORKERS:
        tensor = worker_role(spec, role).parallelism.tensor or 1
        for name, heads in (("heads", model.num_heads), ("KV heads", model.num_kv_heads)):
            if heads is not None and heads % tensor:
                return (
                    f"spec.{role}.parallelism.tensor: {tensor} does not divide the model's "
                    f"{heads} {name}"
                )
    return None
