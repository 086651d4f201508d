"""Adapters of the libraries that follow grammars. No torch in this process."""
