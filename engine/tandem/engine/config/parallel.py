"""Settings that spread one model over ranks."""

from dataclasses import dataclass

from tandem.base.settings import check_choices, check_integer, setting
from tandem.protocol.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of one worker."""

    tensor_parallel_size: int = setting(
        1, "Ranks that share each layer. This version runs one rank.", unit="ranks"
    )

    distributed_executor_backend: str = setting(
        "uni",
        "Process of a rank. uni: the engine's process; mp: a child process, which supports no "
        "hand-off on a GPU.",
        choices=("uni", "mp"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size > 1:
            allowed = "1: in this version one GPU computes a model; several workers share the load"
            raise InvalidParameter("tensor_parallel_size", self.tensor_parallel_size, allowed)
