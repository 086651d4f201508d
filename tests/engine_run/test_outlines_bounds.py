"""What a schema costs to read for outlines-core, whatever its references and lists multiply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines import disjoint, strings, values
from tandem.engine.structured.outlines.disjoint import Disjoint
from tandem.engine.structured.outlines.expressions import read_search
from tandem.engine.structured.outlines.jobs import job_of
from tandem.protocol.structured import StructuredOutputsParams


def test_references_that_multiply_are_bounded():
    """Each level has two of the next: 2^40 of the last."""
    levels = {
        f"l{at}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/l{at + 1}"}] * 2}
        for at in range(40)
    }
    schema = {"$ref": "#/$defs/l0", "$defs": levels | {"l40": {"type": "null"}}}
    with pytest.raises(GrammarError, match="references written out"):
        job_of(StructuredOutputsParams(json=json.dumps(schema)))


def tuple_of(count: int, target: Any) -> dict[str, Any]:
    """A schema of so many references to one."""
    return {"prefixItems": [{"$ref": "#/$defs/a"}] * count, "$defs": {"a": target}}


CODES = [f"code {each}" for each in range(900)]
APART = {"oneOf": [{"$ref": f"#/$defs/{each}"} for each in range(60)]}
TOO_LONG = "references written out"


@pytest.mark.parametrize(
    ("schema", "most", "words"),
    [
        (tuple_of(300, {"enum": CODES}), len(CODES), TOO_LONG),
        (tuple_of(300, {"type": "string", "pattern": "x" * 9_000}), 1, TOO_LONG),
        (tuple_of(300, {"const": "x" * 9_000}), 1, TOO_LONG),
        ({"type": ["string"] * 9_000, "pattern": "x" * 9_000}, 1, None),
        (
            {
                "prefixItems": [APART] * 30,
                "$defs": {str(each): {"enum": CODES[each::60]} for each in range(60)},
            },
            len(CODES),
            None,
        ),
    ],
    ids=["enum", "pattern", "const", "types", "apart"],
)
def test_what_a_schema_refers_to_is_read_once(
    monkeypatch: pytest.MonkeyPatch, schema: Any, most: int, words: str | None
):
    """However often; written out it is too long, and no more of it is written than may be."""
    counts = dict.fromkeys(("written", "listed", "patterns"), 0)

    def counting(name: str, function: Any) -> Any:
        def counted(*given: Any) -> Any:
            counts[name] += 1
            return function(*given)

        return counted

    monkeypatch.setattr(values, "_written", counting("written", values._written))
    monkeypatch.setattr(disjoint, "_text", counting("listed", disjoint._text))
    monkeypatch.setattr(strings, "read_search", counting("patterns", read_search))
    wanted = StructuredOutputsParams(json=json.dumps(schema))
    wanted.verify()
    if words is None:
        assert job_of(wanted).schema is not None
    else:
        with pytest.raises(GrammarError, match=words):
            job_of(wanted)
    assert max(counts.values()) == most


def test_lists_are_compared_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    """Beyond it nothing is called disjoint any more."""
    lists = [{"enum": [10 * at + each for each in range(10)]} for at in range(3)]
    assert Disjoint(lambda each: each).are(lists)
    monkeypatch.setattr(disjoint, "MAX_COMPARED", 32)
    assert not Disjoint(lambda each: each).are(lists)
    assert Disjoint(lambda each: each).are(lists[:2])
