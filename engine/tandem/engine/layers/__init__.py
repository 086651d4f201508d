"""Layers of models: each holds its weights and calls an op of tandem.kernels."""
