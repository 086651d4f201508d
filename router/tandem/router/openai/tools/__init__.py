"""Calls of tools as grammars: those that a request forces, and tools that are strict."""
