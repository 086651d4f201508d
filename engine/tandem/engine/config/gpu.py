"""How a CUDA device is used; nothing here matters on a CPU."""

from dataclasses import dataclass

from tandem.protocol.settings import check_choices, check_flag, check_integer, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUConfig:
    """Graphs, attention, compiled kernels and the slab's memory on a GPU."""

    attention_backend: str = setting(
        "auto",
        "Whose attention kernels run; auto is the first choice of each for the device.",
        choices=("auto", "torch", "triton"),
    )
    enforce_eager: bool = setting(False, "Launch every kernel by itself instead of CUDA graphs.")
    max_cudagraph_capture_size: int = setting(
        2048, "Tokens of the largest step that a CUDA graph is captured for.", unit="tokens"
    )
    slab_memory: str = setting(
        "auto",
        "Who gives the KV slab's memory: vmm is the driver's cuMemCreate, whose handle another "
        "process can map; torch is torch's allocator; auto is vmm where the driver has it.",
        choices=("auto", "vmm", "torch"),
    )
    triton_cache_dir: str | None = setting(
        None,
        "Folder of compiled kernels, to be kept between starts; none is Triton's own choice.",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_flag("enforce_eager", self.enforce_eager)
        check_integer("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 1)
