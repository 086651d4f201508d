"""How one model is spread over ranks."""

from dataclasses import dataclass

from tandem.protocol.settings import check_integer, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of one worker."""

    tensor_parallel_size: int = setting(
        1, "Ranks that share each layer. This version runs one rank.", unit="ranks"
    )

    def __post_init__(self) -> None:
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1, 1)
