"""Protected fields of a pod: the merged pod is compared with the operator's.

So a patch has no bypass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.operator.desired.merge import MAIN, key_of
from tandem.operator.desired.naming import Manifest
from tandem.protocol import names
from tandem.protocol.errors import TandemError

_LISTS = ("env", "volumeMounts", "ports")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_TIMING = {
    "failureThreshold",
    "initialDelaySeconds",
    "periodSeconds",
    "successThreshold",
    "terminationGracePeriodSeconds",
    "timeoutSeconds",
}
"""Fields of a probe that may be changed; its request may not."""
_FREE_IN_FETCH = {"image", "imagePullPolicy", "resources"}
PROXIES = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    for name in (upper, upper.lower())
)
"""Variables that the fetching container may get."""
_IDS = {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups"}
_GUARDED = (
    names.PATH_CURVE_KEYS,
    names.PATH_CURVE_PEERS,
    names.PATH_API_KEYS,
    names.PATH_ADMIN_API_KEYS,
    names.PATH_CANARY,
)
"""Folders that foreign volumes may not cover."""


class TemplateConflict(TandemError, ValueError):
    """A podTemplate changes a protected field."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


def check_protected(own: Manifest, pod: Manifest, *, field: str) -> None:
    """Raise TemplateConflict if ``pod`` lacks or changes a required part of ``own``.

    The message names the field below ``field``.
    """
    _same_entries(
        own["metadata"]["labels"], _at(pod, "metadata", "labels"), f"{field}.metadata.labels"
    )
    mine, theirs, at = own["spec"], _at(pod, "spec"), f"{field}.spec"
    _same(mine, theirs, "serviceAccountName", at)
    _same(mine, theirs, "automountServiceAccountToken", at)
    for name, allowed in (
        ("serviceAccount", mine["serviceAccountName"]),
        ("restartPolicy", "Always"),
    ):
        if theirs.get(name, allowed) != allowed:
            raise TemplateConflict(f"{at}.{name}", _WORDS)
    _same_items(mine, theirs, "volumes", at)
    _check_context(mine, theirs, at)
    _check_container(mine, theirs, "containers", MAIN, at)
    for each in mine.get("initContainers", ()):
        check_fetch(each, theirs, f"{at}.initContainers")


_WORDS = "Tandem sets this; podTemplate must not change it"


def _at(value: Any, *path: str) -> Manifest:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _items(holder: Manifest, field: str) -> list[Manifest]:
    found = holder.get(field)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _same(mine: Manifest, theirs: Manifest, name: str, at: str) -> None:
    if theirs.get(name) != mine[name]:
        raise TemplateConflict(f"{at}.{name}", _WORDS)


def _same_entries(mine: Manifest, theirs: Manifest, at: str) -> None:
    changed = sorted(name for name, value in mine.items() if theirs.get(name) != value)
    if changed:
        raise TemplateConflict(f"{at}.{changed[0]}", _WORDS)


def _same_items(mine: Manifest, theirs: Manifest, field: str, at: str) -> None:
    """Check that each of our named items exists once and is unchanged."""
    for item in mine[field]:
        key = key_of(item, field)
        if [each for each in _items(theirs, field) if key_of(each, field) == key] != [item]:
            name = item.get("name") or item.get("mountPath")
            raise TemplateConflict(f"{at}.{field}[{name}]", _WORDS)


def _check_container(mine: Manifest, theirs: Manifest, field: str, name: str, at: str) -> None:
    own = next(each for each in mine[field] if each["name"] == name)
    found = [each for each in _items(theirs, field) if each.get("name") == name]
    place = f"{at}.{field}[{name}]"
    if len(found) != 1:
        raise TemplateConflict(place, _WORDS)
    if found[0].get("args") != own["args"]:
        raise TemplateConflict(f"{place}.args", f"{_WORDS}; use extraArgs")
    for each in _LISTS:
        _same_items(own, found[0], each, place)
    for probe in _PROBES:
        if _asked(found[0].get(probe)) != _asked(own[probe]):
            raise TemplateConflict(f"{place}.{probe}", f"{_WORDS}, its times aside")
    _check_context(own, found[0], place)
    _check_mounts(own, found[0], place)


def _asked(probe: Any) -> Manifest:
    given = probe if isinstance(probe, dict) else {}
    return {key: value for key, value in given.items() if key not in _TIMING}


def _check_context(mine: Manifest, theirs: Manifest, at: str) -> None:
    """Check our security context: it may be stricter, and have another user except root."""
    own, now = mine.get("securityContext"), _at(theirs, "securityContext")
    if own is None:
        return
    place = f"{at}.securityContext"
    _same_entries({k: v for k, v in own.items() if k not in _IDS}, now, place)
    if own.get("runAsNonRoot") and now.get("runAsUser") == 0:
        raise TemplateConflict(f"{place}.runAsUser", "0 is root; pods must not run as root")


def _check_mounts(own: Manifest, now: Manifest, at: str) -> None:
    known = {each["mountPath"] for each in own["volumeMounts"]}
    for each in _items(now, "volumeMounts"):
        path = str(each.get("mountPath"))
        if path not in known and any(_overlap(path, guarded) for guarded in _GUARDED):
            raise TemplateConflict(f"{at}.volumeMounts[{path}]", "Tandem's keys are there")


def _overlap(one: str, other: str) -> bool:
    first, second = _parts(one), _parts(other)
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def _parts(path: str) -> list[str]:
    """Return the parts of a path; the API server refuses `..`."""
    return [part for part in path.split("/") if part not in ("", ".")]


def check_fetch(own: Manifest, theirs: Manifest, at: str) -> None:
    """Check the fetching container: other resources, another image, and a proxy are allowed."""
    found = [each for each in _items(theirs, "initContainers") if each.get("name") == own["name"]]
    place = f"{at}[{own['name']}]"
    if len(found) != 1:
        raise TemplateConflict(place, _WORDS)
    for name in _changed(own, found[0]):
        words = f"{_WORDS}, proxies aside" if name == "env" else _WORDS
        raise TemplateConflict(f"{place}.{name}", words)


def _changed(own: Manifest, now: Manifest) -> Iterable[str]:
    fields = sorted((set(own) | set(now)) - _FREE_IN_FETCH - {"env"})
    if _but_proxies(own) != _but_proxies(now):
        yield "env"
    yield from (name for name in fields if own.get(name) != now.get(name))


def _but_proxies(container: Manifest) -> list[Manifest]:
    return [each for each in _items(container, "env") if each.get("name") not in PROXIES]
