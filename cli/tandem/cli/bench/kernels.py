"""`tandem bench kernels`: each kernel of a decoder layer against its roofline, on this device.

The roofline is the time for required reads at the memory's rate, or for required products at the
matrix units' rate, if that is longer. Both rates are measured first.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.settings import (
    check_choices,
    check_integer,
    check_optional_integer,
    setting,
)
from tandem.cli.settings.command import check_place, read_command_line
from tandem.cli.settings.flags import Section
from tandem.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tandem.kernels.measure.model_ops import Bench, ModelOps
    from tandem.kernels.measure.timing import Rates

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Shapes to measure; the defaults are those of Qwen3-8B."""

    device: str = setting(
        "auto", "Device to measure; auto: a GPU.", choices=("auto", "cuda", "cpu")
    )
    dtype: str = setting("bfloat16", "Type of weights and KV.", choices=DTYPES)
    batch_sizes: str = setting("1,32,64", "Rows of a step; each number is measured.")
    context_len: int = setting(1024, "Tokens of each sequence, and of the prompt.", unit="tokens")
    hidden_size: int = setting(4096, "Width of the residual stream.")
    intermediate_size: int = setting(12288, "Width of the MLP.")
    num_heads: int = setting(32, "Query heads.")
    num_kv_heads: int = setting(8, "KV heads.")
    head_dim: int = setting(128, "Size of a head.")
    vocab_size: int = setting(151936, "Size of the vocabulary.")
    block_size: int = setting(64, "Tokens of a KV block.", unit="tokens")
    sliding_window: int | None = setting(
        None, "Tokens that a query attends to. Default: all.", unit="tokens"
    )
    only: str = setting("", "Measure only kernels with this text in their name.")
    output_json: str | None = setting(None, "JSON file to write.")

    def __post_init__(self) -> None:
        check_place("output_json", self.output_json)
        check_choices(self)
        for name in ("context_len", "hidden_size", "intermediate_size", "num_heads"):
            check_integer(name, getattr(self, name), 1)
        for name in ("num_kv_heads", "head_dim", "vocab_size", "block_size"):
            check_integer(name, getattr(self, name), 1)
        check_optional_integer("sliding_window", self.sliding_window, 1)
        if self.num_heads % self.num_kv_heads:
            allowed = f"a multiple of num_kv_heads, which is {self.num_kv_heads}"
            raise InvalidParameter("num_heads", self.num_heads, allowed)
        _ = self.rows

    @property
    def rows(self) -> tuple[int, ...]:
        parts = self.batch_sizes.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise InvalidParameter("batch_sizes", self.batch_sizes, "numbers from 1, with commas")
        return tuple(int(part) for part in parts)


def run(argv: list[str]) -> int:
    """Measure and print. Variables of servers do not count."""
    sections = [Section("Kernels", KernelsConfig)]
    given = read_command_line(
        "bench kernels", __doc__ or "", sections, argv, environ={}, takes_file=False
    )
    config = KernelsConfig(**given[KernelsConfig])
    try:
        result = measure(config)
    except InvalidParameter as error:
        print(f"tandem bench kernels: {error}", file=sys.stderr)
        return 2
    show(result)
    if config.output_json:
        Path(config.output_json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(config: KernelsConfig) -> dict[str, Any]:
    """Measure every case. Raises InvalidParameter for a missing device."""
    import torch

    from tandem.kernels.measure import timing

    ops = _ops(config)
    on_gpu = ops.device.type == "cuda"
    found = timing.rates(ops.device, ops.sizes.shape.dtype, small=not on_gpu)
    return {
        "device": torch.cuda.get_device_name(ops.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "shapes": _shapes(config),
        "read_gb_per_s": found.bytes_per_us / 1e3,
        "product_tflop_per_s": found.operations_per_us / 1e6,
        "kernels": [_row(each, ops, found) for each in _benches(config, ops)],
    }


def _shapes(config: KernelsConfig) -> dict[str, Any]:
    """Return the measured shapes by flag."""
    own = {"device", "only", "output_json"}
    return {name: value for name, value in asdict(config).items() if name not in own}


def _ops(config: KernelsConfig) -> ModelOps:
    import torch

    from tandem.kernels.measure.model_ops import ModelOps, Sizes
    from tandem.kernels.measure.timing import Shape

    if config.device != "cpu" and not torch.cuda.is_available():
        allowed = "cpu: this torch sees no CUDA device (its kernels are plain torch's)"
        raise InvalidParameter("device", config.device, allowed)
    shape = Shape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page=config.block_size,
        dtype=getattr(torch, config.dtype),
    )
    sizes = Sizes(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        shape=shape,
        window=config.sliding_window,
    )
    return ModelOps(sizes, torch.device("cpu" if config.device == "cpu" else "cuda"))


def _benches(config: KernelsConfig, ops: ModelOps) -> Iterator[Bench]:
    """Yield the benchmarks one at a time, as each holds memory."""
    for rows in config.rows:
        yield from (
            each for each in ops.cases(rows, config.context_len) if config.only in each.name
        )
    prompt = ops.prompt(config.context_len)
    if config.only in prompt.name:
        yield prompt


def _row(bench: Bench, ops: ModelOps, rates: Rates) -> dict[str, Any]:
    from tandem.kernels.measure.timing import call_us

    read = bench.bytes / rates.bytes_per_us
    multiplied = bench.operations / rates.operations_per_us
    return {
        "kernel": bench.name,
        "us": call_us(bench.run, bench.calls, ops.device),
        "bytes": bench.bytes,
        "operations": bench.operations,
        "roofline_us": max(read, multiplied),
        "bound": "memory" if read >= multiplied else "matrix",
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{result['device']}: reads {result['read_gb_per_s']:,.0f} GB/s, multiplies "
        f"{result['product_tflop_per_s']:,.3g} TFLOP/s",
        highlight=False,
    )
    table = Table("kernel", "us", "roofline, us", "share", "bound by", padding=(0, 1))
    for row in result["kernels"]:
        share = f"{100 * row['roofline_us'] / row['us']:.0f} %"
        table.add_row(
            row["kernel"], f"{row['us']:,.1f}", f"{row['roofline_us']:,.1f}", share, row["bound"]
        )
    console.print(table)
