"""Weights of linear layers: their reading, their form in memory and their products."""

from tandem.engine.quant.base import LinearMethod, LinearPart, PlainMethod, Product, Rows
from tandem.engine.quant.select import method_of, select_method

__all__ = [
    "LinearMethod",
    "LinearPart",
    "PlainMethod",
    "Product",
    "Rows",
    "method_of",
    "select_method",
]
