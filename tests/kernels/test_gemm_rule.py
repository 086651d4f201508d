"""What multiplies a shape that no table knows; without a GPU."""

import json
from importlib.resources import files

import pytest
import torch

from tandem.kernels.gemm import table
from tandem.kernels.gemm.form import ROW_CLASSES, Form, Kind
from tandem.kernels.gemm.rule import FEWEST, form_of
from tandem.kernels.gemm.table import choices_of, form_for

triton = pytest.importorskip("tandem.kernels.gemm.triton")

SIZES = (576, 896, 960, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864, 5120, 8960, 12288, 18944)
OUTPUTS = (*SIZES, 1152, 4608, 9728, 32000, 37888, 49152, 128256, 151936, 152064, 1000, 50257)
SEVERAL = [rows for rows in ROW_CLASSES if 1 < rows <= 64]


@pytest.mark.parametrize("programs", [78, 114, 132])
@pytest.mark.parametrize("kind", Kind)
def test_every_form_of_the_rule_fits_its_shape(kind, programs):
    """It divides the shape, its ring and parts have room, and enough programs are at work."""
    found = 0
    for outputs in OUTPUTS:
        for inner in SIZES:
            for rows in ROW_CLASSES:
                form = form_of(kind, outputs, inner, rows, programs)
                if form is not None:
                    found += 1
                    assert triton.fits(form, kind, outputs, inner, rows), (outputs, inner, rows)
                    assert outputs // form.outputs * form.split >= FEWEST
    assert found > 400


@pytest.mark.parametrize("rows", ROW_CLASSES)
def test_what_cannot_be_tiled_or_does_not_pay_is_left_alone(rows):
    """Outputs that no tile divides, sums of too few programs, more rows than a form pays for."""
    assert form_of(Kind.PLAIN, 50257, 768, rows, 132) is None
    assert form_of(Kind.PLAIN, 64, 4096, rows, 132) is None or rows == 1
    assert form_of(Kind.PLAIN, 4096, 4096, 128, 132) is None


@pytest.mark.parametrize("rows", SEVERAL)
def test_few_tiles_are_split_and_many_are_not(rows):
    """With 16 tiles a program each would leave most of the device idle; with 592 none is."""
    few = form_of(Kind.PLAIN, 1024, 3072, rows, 132)
    many = form_of(Kind.PLAIN, 37888, 3584, rows, 132)
    assert few is not None
    assert few.split >= 4
    assert many is not None
    assert many.split == 1


def test_one_row_goes_without_the_matrix_unit_where_wide_pieces_divide():
    """3,584 is seven times 512; 896 seven times 128, which the streamed kernel takes."""
    assert form_of(Kind.PLAIN, 4608, 3584, 1, 132) == Form(2, 512)
    narrow = form_of(Kind.PLAIN, 9728, 896, 1, 132)
    assert narrow is not None
    assert narrow.stream


@pytest.fixture
def hopper(monkeypatch):
    """A device of that generation with a table: one form, and one product that is better left."""
    entry = {"kind": "plain", "inner": 4096, "rows": 16}
    made = {
        "entries": [
            {**entry, "outputs": 4096, "form": {"outputs": 32, "inner": 64}},
            {**entry, "outputs": 6144, "form": None},
        ]
    }
    monkeypatch.setattr(table, "choices_on", lambda _: choices_of(made))
    monkeypatch.setattr(table, "generation", lambda _: 9)
    monkeypatch.setattr(table, "sm_count", lambda _: 132)
    table._chosen.cache_clear()
    yield torch.device("cuda", 0)
    table._chosen.cache_clear()


def test_the_table_goes_before_the_rule(hopper):
    """Its form is taken as it is, and its null is no gap that the rule would fill."""
    assert form_for(hopper, Kind.PLAIN, 4096, 4096, 9) == Form(32, 64)
    assert form_of(Kind.PLAIN, 6144, 4096, 16, 132) is not None
    assert form_for(hopper, Kind.PLAIN, 6144, 4096, 9) is None


def test_what_the_table_lacks_the_rule_gives(hopper):
    ruled = form_of(Kind.PLAIN, 4608, 3584, 16, 132)
    assert ruled is not None
    assert form_for(hopper, Kind.PLAIN, 4608, 3584, 9) == ruled
    assert form_for(hopper, Kind.PLAIN, 4608, 3584, 129) is None


def test_without_a_table_or_on_another_generation_there_is_no_rule(hopper, monkeypatch):
    """It was measured where the table was."""
    monkeypatch.setattr(table, "generation", lambda _: 8)
    assert form_for(hopper, Kind.PLAIN, 4608, 3584, 9) is None
    monkeypatch.setattr(table, "generation", lambda _: 9)
    monkeypatch.setattr(table, "choices_on", lambda _: {})
    table._chosen.cache_clear()
    assert form_for(hopper, Kind.PLAIN, 4608, 3584, 9) is None
    assert form_for(torch.device("cpu"), Kind.PLAIN, 4608, 3584, 9) is None


def test_the_rule_is_near_what_was_measured():
    """On the products of the table its forms are the table's own or cost little beside cuBLAS: it
    gives one for nine tenths of those that have one up to 64 rows."""
    content = json.loads((files("tandem.kernels.gemm") / "tables" / "nvidia-h200.json").read_text())
    known = {key: form for key, form in choices_of(content).items() if key[3] <= 64}
    ruled = [key for key, form in known.items() if form and form_of(*key, 132)]
    assert len(ruled) > 0.9 * sum(form is not None for form in known.values())
