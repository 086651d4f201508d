"""What models are made of: each layer holds its weights and calls an op of tandem.kernels."""
