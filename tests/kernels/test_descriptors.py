"""KV pages as the rows that a tensor descriptor has."""

import pytest
import torch

from tandem.kernels.attention.descriptors import TokenRows


@pytest.mark.parametrize("layer", [0, 2])
def test_rows_are_the_tokens_of_a_strided_slab(layer):
    """Of each block, K or V, head and token of a layer; the last row is the last there is."""
    kv_cache = torch.rand(4, 3, 2, 5, 64, 64).to(torch.bfloat16)
    kv = kv_cache[:, layer]
    rows = TokenRows.of(kv)
    boxes = rows.boxes(16)
    assert boxes.block_shape == [16, 64]
    assert boxes.strides == [64, 1]
    flat = kv.as_strided(boxes.shape, boxes.strides)
    for block, two, head, token in ((0, 0, 0, 0), (1, 1, 3, 17), (3, 0, 4, 63), (3, 1, 4, 63)):
        row = block * rows.block + two * rows.two + head * rows.head + token
        assert torch.equal(flat[row], kv[block, two, head, token])
    assert torch.equal(flat[-1], kv[-1, -1, -1, -1])
