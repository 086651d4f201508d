"""docs/models.md lists every architecture, and the models by which it is compared."""

import re
from pathlib import Path

from tests.engine_run import encoder_models, tiny_models

from tandem.engine.config.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def rows() -> list[tuple[list[str], list[str]]]:
    """Architectures of each row, and the models that are compared."""
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    names = [[re.findall("`([^`]+)`", line[at]) for at in (2, 4)] for line in lines]
    return [(architectures, models) for architectures, models in names if architectures]


def test_every_architecture_is_in_one_row():
    assert sorted(name for row, _ in rows() for name in row) == sorted(FAMILIES)


def test_every_compared_model_is_in_the_row_of_its_architecture():
    wanted = {name: f"{kind}ForCausalLM" for name, (kind, _) in tiny_models._ALL.items()}
    wanted |= {name: kind for name, (kind, *_) in encoder_models.MODELS.items()}
    listed = {name: row for row, models in rows() for name in models if "HF_ColBERT" not in row}
    assert listed.keys() == wanted.keys()
    assert [name for name, row in listed.items() if wanted[name] not in row] == []
