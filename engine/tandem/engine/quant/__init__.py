"""Weights of linear layers: their reading, their form in memory and their products."""

from tandem.engine.delta import Rows
from tandem.engine.loader import LinearPart
from tandem.engine.quant.base import LinearMethod, PlainMethod, Product
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
