"""Adapters of the libraries that follow grammars, without torch."""
