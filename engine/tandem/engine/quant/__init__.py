"""How the weights of linear layers are held and multiplied."""

from tandem.engine.quant.base import LinearMethod, Product
from tandem.engine.quant.select import select_method

__all__ = ["LinearMethod", "Product", "select_method"]
