"""What a device's table says of products of many rows."""

import json
from importlib.resources import files

import pytest
import torch

from tandem.kernels.gemm import table
from tandem.kernels.gemm.table import Algorithm, algorithm_for, algorithms_of

ONE, OTHER = Algorithm(tile=1, cluster=2), Algorithm(tile=3, cluster=4)
MADE = {
    "entries": [],
    "many_rows": [
        {"outputs": 64, "inner": 32, "rows": 1024, "algorithm": {"tile": 1, "cluster": 2}},
        {"outputs": 64, "inner": 32, "rows": 2048, "algorithm": None},
        {"outputs": 64, "inner": 32, "rows": 4096, "algorithm": {"tile": 3, "cluster": 4}},
    ],
}


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (128, None),
        (1023, None),
        (1024, ONE),
        (2047, ONE),
        (2048, None),
        (4096, OTHER),
        (9999, OTHER),
    ],
)
def test_ranges_of_rows(monkeypatch, rows, want):
    """From one entry's rows to the next one's; few rows and other shapes have none."""
    monkeypatch.setattr(table, "algorithms_on", lambda _: algorithms_of(MADE))
    assert algorithm_for(torch.device("cuda"), 64, 32, rows) == want
    assert algorithm_for(torch.device("cuda"), 64, 33, rows) is None
    assert algorithm_for(torch.device("cpu"), 64, 32, rows) is None


def test_tables_of_the_package_are_read():
    found = list((files("tandem.kernels.gemm") / "tables").iterdir())
    assert found
    for each in found:
        content = json.loads(each.read_text())
        assert table.forms_of(content)
        assert all(ranges for ranges in algorithms_of(content).values())
