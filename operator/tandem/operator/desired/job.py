"""The Job that fetches the model, or reads an existing one."""

from __future__ import annotations

from tandem.operator.desired import model as models
from tandem.operator.desired.capability import unsupported
from tandem.operator.desired.containers import scratch_volumes, with_extras
from tandem.operator.desired.facts import Facts, once
from tandem.operator.desired.fetching import (
    FETCH,
    fetch_container,
    job_container,
    job_pod,
    job_revision,
)
from tandem.operator.desired.merge import TemplateUnreadable
from tandem.operator.desired.naming import MODEL_COMPONENT, Manifest
from tandem.operator.desired.pod import SAFE_TO_EVICT, pod_security
from tandem.operator.desired.policy import answering_role, is_restricted
from tandem.operator.desired.protect import TemplateConflict
from tandem.operator.desired.references import secrets_note
from tandem.protocol.names import EXIT_MODEL_REFUSED

ANNOTATION_MADE_OF = "tandem.dev/made-of"
"""Annotation of a Job: the ``job_revision`` of its pod."""
RETRIES = 3
_NOT_AGAIN: Manifest = {
    "action": "FailJob",
    "onExitCodes": {"containerName": FETCH, "operator": "In", "values": [EXIT_MODEL_REFUSED]},
}
"""Failure policy: absent and unsupported models are not fetched again."""


@once
def model_job(facts: Facts) -> Manifest | None:
    """Return the Job for the spec's model, or None.

    None if each pod fetches, if it has to wait, or if the spec is not supported.
    """
    where = facts.delivery
    if where.in_pods or not facts.may_have_job or unsupported(facts.spec) is not None:
        return None
    owner = facts.owner
    pod: Manifest = {
        "restartPolicy": "Never",
        "serviceAccountName": owner.child("worker"),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "volumes": [*scratch_volumes(), where.volume],
        **_of_template(facts),
    }
    if is_restricted(facts.spec):
        pod["securityContext"] = pod_security()
    metadata = {
        "labels": owner.labels(MODEL_COMPONENT),
        "annotations": {SAFE_TO_EVICT: "false"},
    }
    template = {"metadata": metadata, "spec": pod}
    noted = secrets_note(owner, {"spec": pod}).get("annotations", {})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": owner.metadata(
            models.job_name(owner, where.digest),
            MODEL_COMPONENT,
            annotations={**noted, ANNOTATION_MADE_OF: job_revision(facts.spec, facts.settings)},
        ),
        "spec": {
            "backoffLimit": RETRIES,
            "activeDeadlineSeconds": models.JOB_DEADLINE,
            "podFailurePolicy": {"rules": [_NOT_AGAIN]},
            "template": with_extras(facts.spec, facts.settings, template),
        },
    }


def _of_template(facts: Facts) -> Manifest:
    """Return the parts of the pod from the podTemplate of the answering workers.

    A template that is not accepted sets none.
    """
    try:
        return {"containers": [job_container(facts)], **job_pod(facts.spec, facts.settings)}
    except (TemplateConflict, TemplateUnreadable):
        return {"containers": [fetch_container(facts, answering_role(facts.spec))]}
