"""What the tuner writes into a device's table."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from tandem.kernels.gemm import table


@pytest.fixture
def tune():
    pytest.importorskip("triton")
    return import_module("scripts.tune_gemm")


def entry(outputs, us):
    shape = {"kind": "plain", "outputs": outputs, "inner": 64, "rows": 16}
    return {**shape, "form": None, "us": us, "without_us": us}


def test_products_of_other_models_stay_in_the_table(tune):
    """New entries take the place of those of the same product alone; so do the many rows stay."""
    rows = [{"outputs": 1, "inner": 1, "rows": 1024, "algorithm": None}]
    kept = {"device": "X", "command": "a", "many_rows": rows, "entries": [entry(1, 5), entry(2, 6)]}
    new = {tune.key_of(each): each for each in (entry(2, 3), entry(3, 4))}

    made = tune.merged(kept, new, "b")

    assert [(each["outputs"], each["us"]) for each in made["entries"]] == [(1, 5), (2, 3), (3, 4)]
    assert (made["command"], made["many_rows"], made["device"]) == ("a; later b", rows, "X")


def test_a_table_is_written_as_it_is_read(tune):
    """With a line for each entry, so that a change of one is one line."""
    path = Path(table.__file__).parent / "tables" / "nvidia-h200.json"
    content = json.loads(path.read_text())

    assert tune.text_of(content) == path.read_text()
    assert path.read_text().count("\n") == len(content["entries"]) + len(content["many_rows"]) + 10
