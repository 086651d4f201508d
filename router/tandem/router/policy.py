"""The placement policy that a router's settings select."""

from __future__ import annotations

from tandem.protocol.step_bound import TARGET_ITL_MS
from tandem.router.config import (
    HANDOFF_PATIENCE,
    MIN_HANDOFF_TOKENS,
    TARGET_TTFT_MS,
    RouterConfig,
)
from tandem.router.placement.base import PlacementPolicy
from tandem.router.placement.damage import Targets
from tandem.router.placement.elastic import ElasticPolicy
from tandem.router.placement.prefix_load import PrefixLoadPolicy


def placement_policy(config: RouterConfig) -> PlacementPolicy:
    """Return the placement policy that ``placement`` names."""
    tokens = config.min_handoff_tokens
    if tokens is None:
        tokens = MIN_HANDOFF_TOKENS[config.placement]
    if config.placement == "strict":
        return PrefixLoadPolicy(tokens)
    patience = config.handoff_patience
    if patience is None:
        patience = HANDOFF_PATIENCE[config.placement]
    if config.placement == "conditional":
        return PrefixLoadPolicy(tokens, patience)
    targets = Targets(
        (config.target_ttft_ms or TARGET_TTFT_MS) / 1000,
        (config.target_itl_ms or TARGET_ITL_MS) / 1000,
    )
    return ElasticPolicy(tokens, patience, targets)
