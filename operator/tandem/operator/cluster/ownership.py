"""Ownership of objects: ours by the UID of the controller; others are not touched.

A name proves nothing: any user who may create a ServiceAccount or a Role may give it the name of a
child. Pure; called by ``gather``, ``apply`` and ``repair``.
"""

from __future__ import annotations

import msgspec

from tandem.operator.desired.naming import Identity, Manifest

KIND = "LLMService"


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a child requires and that an object of another owner has."""

    kind: str
    name: str
    owner: str
    """Owner of the object, as text for a condition."""
    passes: bool
    """Whether the garbage collector is about to remove it."""

    def message(self) -> str:
        """Return the problem and its remedy, as a sentence for a condition."""
        text = f"{self.kind} {self.name} is there already and belongs to {self.owner}"
        if self.passes:
            return f"{text}; waiting until it is collected"
        return f"{text}; it stays unchanged: remove it, or rename the LLMService"


def controller_of(item: Manifest) -> Manifest | None:
    """Return the owner reference that controls an object, or None."""
    owners = item["metadata"].get("ownerReferences") or ()
    found: Manifest | None = next((each for each in owners if each.get("controller")), None)
    return found


def is_owned(item: Manifest, uid: str) -> bool:
    """Return whether the LLMService of this UID controls an object."""
    owner = controller_of(item)
    return owner is not None and (owner["kind"], owner["uid"]) == (KIND, uid)


def owner_uid(manifest: Manifest) -> str:
    """Return the UID of the LLMService that a child of ours names as its controller."""
    owner = controller_of(manifest)
    assert owner is not None, manifest["metadata"]["name"]
    uid: str = owner["uid"]
    return uid


def is_ours(item: Manifest, owner: Identity) -> bool:
    """Return whether an object belongs to a service: directly, or for pods through their maker.

    A pod's ReplicaSet or Job is not read: its name is enough, since it is made from that of a
    child.
    """
    if item["kind"] != "Pod":
        return is_owned(item, owner.uid)
    maker = controller_of(item)
    return (
        maker is not None
        and maker["kind"] in ("ReplicaSet", "Job")
        and maker["name"].startswith(f"{owner.name}-")
    )


def taken(item: Manifest, manifest: Manifest) -> Taken:
    """Return the conflict with ``item``, which has the name of ``manifest``."""
    metadata, ours = item["metadata"], controller_of(manifest)
    owner = controller_of(item)
    earlier = (
        ours is not None
        and owner is not None
        and (owner["kind"], owner["name"]) == (KIND, ours["name"])
    )
    return Taken(
        kind=manifest["kind"],
        name=metadata["name"],
        owner=_owner_text(item, earlier=earlier),
        passes=earlier or "deletionTimestamp" in metadata,
    )


def _owner_text(item: Manifest, *, earlier: bool) -> str:
    owner = controller_of(item)
    if owner is not None and earlier:
        return f"an earlier LLMService {owner['name']} (uid {owner['uid']})"
    if owner is not None:
        return f"{owner['kind']} {owner['name']}"
    writers = [each.get("manager", "") for each in item["metadata"].get("managedFields") or ()]
    written = next((f" (written by {name})" for name in writers if name), "")
    return f"no LLMService{written}"
