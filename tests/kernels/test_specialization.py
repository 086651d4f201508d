"""Numbers that change from step to step never make a kernel be compiled anew."""

import importlib

import pytest

AT = "tandem.kernels"
LOOSE = {
    f"{AT}.attention.decode.plan_kernels:plan_shares": "lengths cu_seqlens_q block_tables "
    "num_seqs num_shares most_pieces table_row num_blocks",
    f"{AT}.attention.decode.triton_kernels:decode_shares": "lengths cu_seqlens_q block_tables "
    "table_row num_blocks",
    f"{AT}.attention.decode.gluon_kernels:decode_stream": "tables lengths starts table_row",
    f"{AT}.attention.prefill.plan_kernels:plan_tiles": "cu_seqlens_q lengths num_seqs max_tiles",
    f"{AT}.attention.prefill.gluon_kernels:prefill_tiles": "tables table_row",
    f"{AT}.attention.prefill.triton_kernels:prefill_tiles": "tables table_row",
    f"{AT}.blocks.triton_kernels:add_terms": "total num_bytes",
    f"{AT}.rotary_kv.triton_kernels:rotate_heads": "blocks offsets",
    f"{AT}.gemm.gluon_kernels:multiply_stream": "rows length pieces",
    f"{AT}.gemm.triton_kernels:multiply_few": "rows",
    f"{AT}.sampling.columns.triton_kernels:gather_columns": "n m",
}


@pytest.mark.parametrize("where", LOOSE)
def test_what_changes_with_a_step_is_no_part_of_a_kernel(where):
    """A count that is 1 or divisible by 16, or a view that begins elsewhere, runs what is there:
    compiling takes a second, and a client would see it."""
    module, name = where.split(":")
    kernel = getattr(importlib.import_module(module), name)
    loose = {each.name for each in kernel.params if each.do_not_specialize}
    assert set(LOOSE[where].split()) <= loose
