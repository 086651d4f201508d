"""Where the kernel tests run: on a GPU, or small in Triton's interpreter on a CPU, or nowhere."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
DEVICE = "cuda" if GPU else "cpu"
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float32]

NEEDS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"),
]


def size(on_gpu, interpreted):
    """One of two sizes: the interpreter takes milliseconds for what a GPU does in microseconds."""
    return on_gpu if GPU else interpreted
