"""Facts of layers with a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Scoring(Enum):
    """Scores of a token's experts, by the names of ``tandem.kernels.moe``."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"


class ExpertActivation(Enum):
    """Activation of an expert, by the names of ``tandem.kernels.moe``."""

    SILU = "silu"
    CLAMPED = "clamped"
    RELU2 = "relu2"
    """Squared ReLU without a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's tensors in the checkpoint."""

    block: str = "mlp"
    """Module of router and experts, below that of the layer."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    stacked: bool = False
    """Whether gate_up_proj [experts, hidden, 2 * width], whose columns are a gate's and an up's in
    turn, and down_proj [experts, width, hidden] hold all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Experts of some layers, and the choice of a token's."""

    num_experts: int
    experts_per_token: int
    width: int
    """Values between the products of one expert."""
    layers: tuple[int, ...]
    """Layers that have experts; others have an MLP."""
    scoring: Scoring
    norm_topk: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    num_groups: int = 1
    chosen_groups: int = 1
    """Groups of consecutive experts from which a token's are chosen."""
    correction_bias: bool = False
    """Whether a vector is added to the scores that choose, not to the weights (noaux_tc)."""
    routed_scale: float = 1.0
    """Factor of the experts' sum."""
    router_bias: bool = False
    expert_bias: bool = False
    shared_width: int | None = None
    """Width of an expert that all tokens have."""
    shared_gate: bool = False
    """Whether the shared expert is multiplied by the sigmoid of a product."""
    activation: ExpertActivation = ExpertActivation.SILU
    names: ExpertNames = field(default_factory=ExpertNames)

    @property
    def num_products(self) -> int:
        """Return the matrices [hidden, width] of one expert."""
        return 2 if self.activation is ExpertActivation.RELU2 else 3
