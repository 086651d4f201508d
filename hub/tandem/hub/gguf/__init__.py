"""GGUF files: one file with weights, vocabulary and settings, as llama.cpp writes them."""

VERSION = 4
"""Version of the converter's output; part of the cache's key."""
