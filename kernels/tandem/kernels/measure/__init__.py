"""Kernels against their rooflines: batches to run them on, clocks, and the cases of a model.

For measuring alone: `tandem bench kernels` and the scripts of bench/kernels call it, no op does.
"""
