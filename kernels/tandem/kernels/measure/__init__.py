"""Measurements of kernels against their rooflines, for `tandem bench kernels`."""
