"""GGUF files: one file with weights, vocabulary and settings, as llama.cpp writes them.

Converted once into a prepared folder: ``header`` reads what the file says of itself and ``reader``
opens it; ``keys`` refuses what is not followed; ``config``, ``tokenizer``, ``pooling`` and
``tensors`` translate its parts, ``convert`` writes the folder. ``head`` says how much of a file is
no values, for its digest. Nothing else in Tandem knows GGUF.
"""

VERSION = 3
"""Raised whenever the converter would write other files than before; part of the cache's key."""
