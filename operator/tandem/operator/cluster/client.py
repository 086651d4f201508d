"""Client of the API server, for the verbs and kinds of the operator.

Objects stay dictionaries, so that no field is lost. Blocking; for threads only.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3 import Timeout
from urllib3.exceptions import HTTPError

from tandem.operator import look
from tandem.operator.api.values import API_VERSION
from tandem.operator.cluster.fence import Fence, FencedOff
from tandem.operator.desired.naming import MANAGER, Manifest
from tandem.operator.desired.revision import as_go_writes
from tandem.protocol.errors import TandemError

CONNECT_SECONDS, READ_SECONDS = 4.0, 10.0
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_STEPS = "application/json-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"

KINDS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Event": ("/api/v1", "events"),
    "Job": ("/apis/batch/v1", "jobs"),
    "LLMRoleScaler": (f"/apis/{API_VERSION}", "llmrolescalers"),
    "LLMService": (f"/apis/{API_VERSION}", "llmservices"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Pod": ("/api/v1", "pods"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
}


class ClusterError(TandemError):
    """The API server refused, or could not be reached (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Cluster:
    """Connection pool to one API server."""

    def __init__(
        self,
        *,
        pool: int = 16,
        timeout: float = READ_SECONDS,
        kubeconfig: Path | None = None,
        fence: Fence | None = None,
    ) -> None:
        """``fence``: nothing is written while it is closed."""
        settings = client.Configuration()
        _authenticate(settings, kubeconfig)
        # The proxy is found once: the environment may change in another thread.
        settings._proxy_from_env = False
        settings.connection_pool_maxsize = pool
        settings.retries = 0
        self._api = client.ApiClient(settings)
        self._timeout = timeout
        self._fence = fence

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        try:
            return {"kind": kind, **self._call("GET", _path(kind, namespace, name))}
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def items(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
        """Return the objects of a namespace, or of the cluster for None."""
        query = {"labelSelector": selector} if selector else {}
        found: list[Manifest] = self._call("GET", _path(kind, namespace), query)["items"]
        return found

    def page(
        self, kind: str, namespace: str | None, *, selector: str, limit: int, token: str
    ) -> Manifest:
        """Return at most ``limit`` objects; the metadata has the next page's token."""
        query = {"limit": str(limit), "labelSelector": selector, "continue": token}
        given = {name: value for name, value in query.items() if value}
        return self._call("GET", _path(kind, namespace), given)

    def apply(
        self, manifest: Manifest, *, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """Apply an object server-side, strictly validated; return the result.

        With a UID in its metadata the object must have it, else 409.
        """
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        path = _path_of(manifest, subresource)
        return self._call("PATCH", path, query, manifest, _APPLY)

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest | None:
        """Make an object; None if it exists."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata["namespace"])
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        try:
            return self._call("POST", path, query, manifest, _JSON)
        except ClusterError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return None
            raise

    def replace(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Write an object back; 409 if it changed since it was read."""
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        return self._call("PUT", _path_of(manifest), query, manifest, _JSON)

    def patch(self, kind: str, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Send a merge patch; None if the object does not exist."""
        query = {"fieldManager": MANAGER}
        try:
            return self._call("PATCH", _path(kind, namespace, name), query, body, _MERGE)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def patch_pod_status(self, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Send a strategic merge patch of a pod's status; None if the pod does not exist.

        With a UID in the patch the pod must have it.
        """
        path = _path("Pod", namespace, name, "status")
        try:
            return self._call("PATCH", path, {"fieldManager": MANAGER}, body, _STRATEGIC)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def write_fields(self, item: Manifest, entries: list[Manifest]) -> Manifest:
        """Set the managers of an object's fields; 409 if it changed since it was read."""
        metadata = item["metadata"]
        steps = [
            {"op": "replace", "path": "/metadata/managedFields", "value": entries},
            {
                "op": "replace",
                "path": "/metadata/resourceVersion",
                "value": metadata["resourceVersion"],
            },
        ]
        path = _path(item["kind"], metadata["namespace"], metadata["name"])
        return self._call("PATCH", path, {"fieldManager": MANAGER}, steps, _STEPS)

    def delete(self, kind: str, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Delete an object and, in the background, its dependents. An absent one is accepted.

        ``uid`` deletes only that object.
        """
        body: Manifest = {"propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            self._call("DELETE", _path(kind, namespace, name), {}, body, _JSON)
        except ClusterError as error:
            if error.status != 404 and not (uid is not None and error.status == 409):
                raise

    def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Manifest | list[Manifest] | None = None,
        content_type: str = _JSON,
    ) -> Manifest:
        query = query or {}
        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        unfenced = nullcontext(self._timeout)
        fenced = unfenced if self._fence is None or method == "GET" else self._fence.writing()
        try:
            with fenced as seconds:
                begin, status = time.monotonic(), 0
                try:
                    status, data = self._send(method, url, path, body, content_type, seconds)
                finally:
                    look.called(
                        method,
                        path,
                        content_type,
                        name=_name_of(body) if method == "POST" else "",
                        dry_run="dryRun" in query,
                        begin=begin,
                        status=status,
                    )
        except FencedOff as error:
            raise ClusterError(0, "FencedOff", str(error)) from error
        return _content(status, data)

    def _send(
        self,
        method: str,
        url: str,
        path: str,
        body: Manifest | list[Manifest] | None,
        content_type: str,
        seconds: float,
    ) -> tuple[int, bytes]:
        """Return status and answer of one call within ``seconds``. Raises ClusterError without an
        answer.
        """
        headers: dict[str, Any] = {"Accept": _JSON, "Content-Type": content_type}
        patience = min(seconds, self._timeout)
        try:  # the token is a file that is read again
            self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            answer = self._api.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=_encoded(body),
                timeout=Timeout(connect=min(CONNECT_SECONDS, patience), read=patience),
                retries=False,
            )
        except (ApiException, HTTPError, OSError, config.ConfigException) as error:
            raise ClusterError(0, type(error).__name__, str(error)) from error
        return answer.status, answer.data


def _encoded(body: Manifest | list[Manifest] | None) -> bytes | None:
    if body is None:
        return None
    return msgspec.json.encode(as_go_writes(body) if isinstance(body, dict) else body)


def _authenticate(settings: client.Configuration, kubeconfig: Path | None) -> None:
    """Authenticate by the pod's account, else by the kubeconfig or $KUBECONFIG. Raises
    ClusterError.
    """
    given = None if kubeconfig is None else str(kubeconfig)
    try:
        if given is None:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            return
    except config.ConfigException:
        pass
    try:
        config.load_kube_config(given, client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        text = f"neither a pod's account nor a kubeconfig: {error}"
        raise ClusterError(0, "NoAccess", text) from error


def _content(status: int, data: bytes) -> Manifest:
    try:
        content: Manifest = msgspec.json.decode(data) if data else {}
    except msgspec.DecodeError:
        content = {"message": data[:500].decode(errors="replace")}
    if status >= 400:
        raise ClusterError(status, content.get("reason", ""), content.get("message", ""))
    return content


def _name_of(body: Manifest | list[Manifest] | None) -> str:
    """Return the name of an object that is to be made, or the prefix of a generated name."""
    if not isinstance(body, dict):
        return ""
    metadata = body["metadata"]
    name: str = metadata.get("name") or metadata.get("generateName", "")
    return name


def _path(kind: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    prefix, plural = KINDS[kind]
    parts = [prefix]
    if namespace is not None:
        parts += ["namespaces", namespace]
    parts.append(plural)
    return "/".join(parts + [part for part in (name, subresource) if part])


def _path_of(manifest: Manifest, subresource: str = "") -> str:
    metadata = manifest["metadata"]
    return _path(manifest["kind"], metadata["namespace"], metadata["name"], subresource)


REFUSALS = (400, 403, 422)
"""Statuses for an object that is not accepted."""
_OF_ALL = (0, 401)
"""Statuses that concern no single object: no connection, or no authentication."""
_BUSY = 429
_LATE = "ReadTimeoutError"
"""Reason of a timeout on an open connection."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused write; others continue."""

    what: str
    """Kind and name of the object."""
    error: ClusterError
    passes: bool
    """Whether it may be accepted later without a change."""

    def message(self) -> str:
        """Return the object and the API server's message, for a condition."""
        return f"{self.what}: {self.error.message or self.error}"


def refused(what: str, error: ClusterError) -> Refused:
    """Return the refusal of a write. Raises the error if it concerns all writes."""
    if error.status in (*_OF_ALL, _BUSY):
        raise error
    look.met(error)
    return Refused(what, error, passes=error.status not in REFUSALS)


def unanswered(what: str, error: ClusterError) -> Refused:
    """Return the refusal of a question, which stays open. Raises the error without a connection.

    A dry run may exceed the timeout, since it waits for webhooks.
    """
    if error.status in _OF_ALL and error.reason != _LATE:
        raise error
    look.met(error)
    return Refused(what, error, passes=True)
