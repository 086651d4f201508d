"""Parameters of a step in plain torch."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.sampling.rng import Purpose, row_keys
from tandem.kernels.sampling.types import Filters

from . import Columns, Gathered


def gather(columns: Columns, rows: Tensor, draws: Tensor) -> Gathered:
    """See the wrapper."""
    drawing, choices, positions = draws
    filters = Filters(columns.min_p[rows], columns.top_k[rows], columns.top_p[rows])
    keys = row_keys(columns.seeds[drawing], choices, positions, Purpose.TOKEN)
    return Gathered(keys, columns.temperature[rows], filters)
