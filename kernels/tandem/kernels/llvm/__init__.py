"""Kernels of a CPU, built of LLVM's instructions and compiled for the processor at hand."""
