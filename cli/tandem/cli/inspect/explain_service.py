"""`tandem explain service`: what the operator would do for an LLMService now, without doing it.

With a file, the resource is replaced by the file's. Every write is a dry run of the API server, and
requires the rights of the operator's writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tandem.cli.settings.command import Parser, read_command_line
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import LogConfig
from tandem.operator.api.status import Condition
from tandem.operator.cluster import Cluster
from tandem.operator.rehearse.rehearsal import Rehearsal, rehearse
from tandem.operator.rehearse.stage import Change, Difference, Stage
from tandem.operator.settings import OperatorSettings
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ENV_PREFIX

MAX_FIELDS = 40
"""Maximum fields of one object or one revision's pods."""
_SIGNS = {"create": "+", "update": "~", "delete": "-"}
_GOOD = {"Progressing": "False", "Degraded": "False", "ScalingActive": "False"}
"""Good statuses that are not True."""


def drawn(found: Rehearsal, file: str | None) -> str:
    """Return the whole text."""
    blocks = (_head(found, file), _changes(found), _revisions(found), _conditions(found))
    return "\n".join(line.rstrip() for block in blocks for line in block)


def _head(found: Rehearsal, file: str | None) -> Iterator[str]:
    if file is None:
        yield f"LLMService {found.service}, generation {found.generation}, as it is now"
    elif found.exists:
        yield f"LLMService {found.service}, as {file} would change it (dry run)"
        yield from _fields(found.spec, "  ") if found.spec else ("  no change",)
    else:
        yield f"LLMService {found.service}, which does not exist, as {file} would create it"
    summary = found.after.summary
    parts = {"prefill": summary.prefill, "decode": summary.decode, "router": summary.router}
    counts = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
    if counts:
        yield f"ready of requested: {counts}; links {summary.links}"
    yield ""


def _changes(found: Rehearsal) -> Iterator[str]:
    if not found.changes:
        yield "The operator would make no change."
    else:
        count = len(found.changes)
        yield f"The operator would make {count} change{'s' if count > 1 else ''}, in this order:"
    for change in found.changes:
        yield f"  {_SIGNS[change.verb]} {change.verb} {change.kind} {change.name}{_of(change)}"
        yield from _fields(change.differences, "      ")
    yield ""


def _of(change: Change) -> str:
    return ":" if change.differences else ""


def _revisions(found: Rehearsal) -> Iterator[str]:
    for each in found.revisions:
        if each.before is None:
            yield f"New revision of {each.role}: {each.after}, its first"
        else:
            yield f"New revision of {each.role}: {each.before} -> {each.after}; its pods differ in"
            yield from _fields(each.differences, "      ")
    if found.revisions:
        yield ""


def _fields(differences: Sequence[Difference], indent: str) -> Iterator[str]:
    for each in differences[:MAX_FIELDS]:
        before = "(nothing)" if each.before is None else each.before
        after = "(nothing)" if each.after is None else each.after
        yield f"{indent}{each.path}: {before} -> {after}"
    if len(differences) > MAX_FIELDS:
        yield f"{indent}... {len(differences) - MAX_FIELDS} fields more"


def _conditions(found: Rehearsal) -> Iterator[str]:
    """Yield the conditions that would change, then those that prevent readiness."""
    before = {each.type: each for each in found.before.conditions}
    moved = [
        each
        for each in found.after.conditions
        if _state_of(each) != _state_of(before.get(each.type))
    ]
    if moved:
        yield "Its conditions would become:"
        for each in moved:
            old = before.get(each.type)
            was = "unset" if old is None else f"{old.status} {old.reason}"
            yield f"  {each.type}: {was} -> {each.status} {each.reason}"
            yield f"      {each.message}"
    known = {each.type for each in moved}
    open_ones = [
        each for each in found.after.conditions if _is_open(each) and each.type not in known
    ]
    if open_ones:
        yield "Why it is not at rest:"
        for each in open_ones:
            yield f"  {each.type} {each.status} {each.reason}: {each.message}"
    if not moved and not open_ones:
        yield "Every condition is well and would stay so."


def _state_of(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.status, condition.reason)


def _is_open(condition: Condition) -> bool:
    return condition.status != _GOOD.get(condition.type, "True")


OPERATOR = "tandem-system"
LABEL = "app.kubernetes.io/name=tandem-operator"
"""Label of the operator's Deployment."""
NONE = "none"
MOST_BYTES = 1 << 20
"""Maximum bytes of a file."""


def run(argv: list[str]) -> int:
    """Print the plan.

    Raises InvalidParameter, TandemError, and ClusterError with the API server's message.
    """
    parser = Parser(prog="tandem explain service", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="the LLMService")
    parser.add_argument(
        "-n", "--namespace", default="default", help="namespace of the service; default: default"
    )
    parser.add_argument("-f", "--filename", type=Path, help="YAML file of a changed resource")
    parser.add_argument(
        "--operator",
        default=OPERATOR,
        metavar="NAMESPACE[/NAME]",
        help="Deployment of the operator, for its flags; without a name, the one with the label "
        f"{LABEL}; {NONE}: no flags; default: {OPERATOR}",
    )
    parser.add_argument(
        "--kubeconfig", type=Path, help="kubeconfig file; default: $KUBECONFIG, else ~/.kube/config"
    )
    options = parser.read(argv)
    stage = Stage(kubeconfig=options.kubeconfig)
    changed = None
    if options.filename is not None:
        changed = resource_of(options.filename, options.name)
    settings = operator_settings(stage, options.operator)
    found = rehearse(stage, settings, options.namespace, options.name, changed)
    print(drawn(found, None if options.filename is None else str(options.filename)))
    return 0


def resource_of(path: Path, name: str) -> dict[str, Any]:
    """Return the LLMService of this name from a file of documents."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise InvalidParameter("--filename", str(path), f"a file of {MOST_BYTES} bytes at most")
        documents = list(yaml.safe_load_all(text))
    except (OSError, yaml.YAMLError) as error:
        raise InvalidParameter("--filename", str(path), f"readable YAML ({error})") from error
    for each in documents:
        if not isinstance(each, dict) or each.get("kind") != "LLMService":
            continue
        metadata = each.get("metadata")
        if isinstance(metadata, dict) and metadata.get("name") == name:
            return each
    raise InvalidParameter("--filename", str(path), f"YAML with an LLMService named {name}")


def operator_settings(cluster: Cluster, where: str) -> OperatorSettings:
    """Return the operator's settings from a Deployment: flags, and literal variables."""
    if where == NONE:
        return OperatorSettings()
    allowed = f"NAMESPACE[/NAME] of the operator's Deployment, or {NONE}"
    namespace, slash, name = where.partition("/")
    if not namespace or bool(slash) != bool(name):
        raise InvalidParameter("--operator", where, allowed)
    if name:
        found = [each for each in [cluster.get("Deployment", namespace, name)] if each]
    else:
        found = cluster.items("Deployment", namespace, LABEL)
    if len(found) != 1:
        names = ", ".join(sorted(each["metadata"]["name"] for each in found))
        why = f"there are several ({names}); select one" if found else "there is no such Deployment"
        raise InvalidParameter("--operator", where, f"{allowed}; {why}")
    (deployment,) = found
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        if "operator" in words:
            return _settings(words[words.index("operator") + 1 :], container, namespace)
    raise InvalidParameter("--operator", where, f"{allowed}; no container in it runs the operator")


def _settings(words: list[str], container: dict[str, Any], namespace: str) -> OperatorSettings:
    variables = {each["name"]: each.get("value") for each in container.get("env") or ()}
    environ = {
        name: value
        for name, value in variables.items()
        if value is not None and name.startswith(ENV_PREFIX)
    }
    sections = [Section("Operator", OperatorSettings), Section("Logging", LogConfig)]
    given = read_command_line("operator", "", sections, words, environ)
    return OperatorSettings(**{"own_namespace": namespace, **given[OperatorSettings]})
