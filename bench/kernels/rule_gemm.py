"""Quality of the rule for shapes of no table: python bench/kernels/rule_gemm.py TIMES.

Reads what every form took (`tune_gemm.py --times`) and prints, by kind and rows, what the rule's
forms take beside the fastest ones and beside doing without: geometric means and worst cases. What
it leaves alone counts as doing without. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from tandem.kernels.gemm.form import Form, Kind
from tandem.kernels.gemm.rule import form_of

PROGRAMS = 132
"""Multiprocessors of an H200."""


def ruled_us(product: dict[str, Any]) -> float:
    """Return the microseconds of a product by the rule; KeyError if its form was not measured."""
    kind, shape = Kind(product["kind"]), [product[n] for n in ("outputs", "inner", "rows")]
    form = form_of(kind, *shape, PROGRAMS)
    if form is None:
        return float(product["without_us"])
    took = {Form(**each): us for us, each in product["forms"]}
    return float(took[form])


def main() -> None:
    """Print a line for each kind and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=Path)
    ratios: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for product in json.loads(parser.parse_args().times.read_text()):
        us = ruled_us(product)
        best = min([product["without_us"], *(each for each, _ in product["forms"])])
        ratios[product["rows"], product["kind"]].append((us / best, us / product["without_us"]))
    for (rows, kind), found in sorted(ratios.items()):
        shown = []
        for name, values in zip(("fastest", "without"), zip(*found, strict=True), strict=True):
            mean = math.exp(sum(map(math.log, values)) / len(values))
            shown.append(f"{mean:.3f} (worst {max(values):.3f}) of the {name}")
        print(f"{rows:3} rows, {kind:5}, {len(found):2} products: {', '.join(shown)}")


if __name__ == "__main__":
    main()
