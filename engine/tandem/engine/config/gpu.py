"""Settings of CUDA devices, and the peaks of any device; only the latter matter on a CPU."""

from dataclasses import dataclass

from tandem.base.settings import check_choices, check_flag, check_integer, check_positive, setting

MOST_PER_SECOND = 1e18
"""Bound of the operations or bytes a second that the settings may state for one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUConfig:
    """Graphs and attention on a GPU."""

    attention_backend: str = setting(
        "auto",
        "Attention kernels. auto: the preferred ones for the device.",
        choices=("auto", "torch", "triton"),
    )
    enforce_eager: bool = setting(False, "Launch single kernels instead of CUDA graphs.")
    max_cudagraph_capture_size: int | None = setting(
        None,
        "Tokens of the largest step with a CUDA graph. Default: 2048; for an encoder, the "
        "largest step.",
        unit="tokens",
    )
    device_peak_flops: float | None = setting(
        None,
        "Peak operations per second of the device, for MFU. Default: its data sheet, if known.",
    )
    device_peak_bytes_per_second: float | None = setting(
        None,
        "Peak memory bandwidth of the device in bytes per second, for MBU. Default: its data "
        "sheet, if known.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_flag("enforce_eager", self.enforce_eager)
        if self.max_cudagraph_capture_size is not None:
            check_integer("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 1)
        for name in ("device_peak_flops", "device_peak_bytes_per_second"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value, MOST_PER_SECOND)
