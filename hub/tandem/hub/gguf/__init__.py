"""GGUF files: one file with weights, vocabulary and settings, as llama.cpp writes them.

Converted once into a prepared folder: ``reader`` opens the file, ``config``, ``tokenizer`` and
``tensors`` translate its parts, ``convert`` writes the folder. ``head`` says how much of a file is
no values, for its digest. Nothing else in Tandem knows GGUF.
"""

VERSION = 2
"""Raised whenever the converter would write other files than before; part of the cache's key."""
