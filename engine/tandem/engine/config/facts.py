"""Shape of a model, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.engine.config.experts import ExpertFacts
from tandem.engine.config.quantization import QuantFacts
from tandem.engine.config.scheduler import PROMPT_CUTS, SchedulerConfig
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import ModelPooling

if TYPE_CHECKING:
    from tandem.engine.config.cache import CacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """Facts of an encoder: bidirectional attention, tables of positions and token types."""

    num_positions: int
    """Rows of the table of positions."""
    position_offset: int = 0
    """Row of a prompt's first token; nonzero for RoBERTa."""
    num_token_types: int = 1
    """Rows of the table of token types; with two, a pair's second text has its own."""
    layer_norm_eps: float = 1e-12
    token_values: int | None = None
    """Values of a token's vector if an additional layer makes it, for late interaction."""


def check_settings(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Raise InvalidParameter for a setting of kept KV or cut prompts, which encoders lack."""
    for name in ("kv_cache_memory_bytes", "kv_offloading_size"):
        if getattr(cache, name) is not None:
            raise InvalidParameter(name, getattr(cache, name), "none: an encoder keeps no KV")
    if cache.kv_cache_dtype != "auto":
        allowed = "auto: an encoder keeps no KV"
        raise InvalidParameter("kv_cache_dtype", cache.kv_cache_dtype, allowed)
    for name in ("long_prefill_token_threshold", *PROMPT_CUTS):
        if getattr(scheduler, name) is not None:
            allowed = "none: an encoder computes a prompt in one step"
            raise InvalidParameter(name, getattr(scheduler, name), allowed)


DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Rotary position embedding."""

    theta: float = DEFAULT_THETA
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn, ... as in transformers."""
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the kind (``factor``, ``low_freq_factor``, ...); empty for default."""
    partial: float = 1.0
    """Part of each head that is rotated, from its first number on."""
    stated_scaled: bool = False
    """True if max_position_embeddings is the length after scaling by any kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionFacts:
    """Layers of a gated delta rule, whose KV is one state per sequence."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int
    """Tokens of the causal convolution over q, k and v."""

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: q, k and v."""
        keys = self.num_key_heads * self.key_head_dim
        return 2 * keys + self.num_value_heads * self.value_head_dim

    @property
    def state_size(self) -> int:
        """Return the numbers of one value head's state, its share of the convolution's included."""
        share = -(-self.channels * (self.conv_kernel - 1) // self.num_value_heads)
        return self.key_head_dim * self.value_head_dim + share


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFacts:
    """Layers of multi-head latent attention (DeepSeek-AI 2024): a token's keys and values are
    products of one vector, which is kept with one rotated key of all heads."""

    rank: int
    """Numbers of the vector (kv_lora_rank)."""
    rope_dim: int
    """Numbers of the rotated key, and of the rotated part of a query (qk_rope_head_dim)."""
    nope_dim: int
    """Other numbers of a head's query and key (qk_nope_head_dim)."""
    value_dim: int
    """Numbers of a head's value (v_head_dim)."""
    q_rank: int | None
    """Numbers of the vector of which queries are products (q_lora_rank); None: of the hidden
    state."""

    @property
    def width(self) -> int:
        """Return the numbers that are kept of a token and layer."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors of a decoder's residual stream and logits."""

    embedding: float = 1.0
    """Factor of tokens' embeddings, also of those that requests give."""
    residual: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the stream."""
    logits: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Shape of one model: a decoder, unless ``encoder`` is set."""

    architecture: str
    """First of ``architectures``, such as LlamaForCausalLM."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeFacts = field(default_factory=RopeFacts)
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation."""
    hidden_act: str = "silu"
    sliding_window: int | None = None
    """Keys that a query of a WINDOW layer attends to, its own included."""
    layer_kinds: tuple[KVKind, ...] = ()
    """Kind of each layer's KV; empty: one kind for all, by ``sliding_window``."""
    local_rope: RopeFacts | None = None
    """Rotary embedding of WINDOW layers if it differs."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose queries and keys have no rotary embedding."""
    multipliers: Multipliers = field(default_factory=Multipliers)
    linear: LinearAttentionFacts | None = None
    """Facts of STATE layers."""
    attention_sinks: bool = False
    """Whether each head has a logit that joins the softmax and has no value."""
    experts: ExpertFacts | None = None
    """Facts of layers with a mixture of experts."""
    latent: LatentFacts | None = None
    """Facts of LATENT layers, whose head_dim is that of queries and keys."""
    attention_scale: float | None = None
    """Factor of the scores; None is head_dim ** -0.5."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    """Type of the checkpoint, if config.json states one."""
    quantization: QuantFacts | None = None
    """Form of the linear layers' weights; None is plain."""
    pooling: ModelPooling = field(default_factory=ModelPooling)
    """Outputs of the model other than tokens."""
    encoder: EncoderFacts | None = None
    """Facts of a model without KV and tokens."""
    text_length: int | None = None
    """Upper bound of a text's tokens in sentence-transformers' files."""

    @property
    def kinds(self) -> tuple[KVKind, ...]:
        """Return the kind of each layer's KV; an encoder's layers have none."""
        if self.layer_kinds or self.encoder is not None:
            return self.layer_kinds
        kind = KVKind.FULL if self.sliding_window is None else KVKind.WINDOW
        return (kind,) * self.num_layers

    @property
    def derived_max_len(self) -> int:
        """Return the longest sequence that positions, rope scaling and ``text_length`` allow.

        llama3 and longrope state the scaled length; yarn scales the original one.
        """
        length = self._scaled_length
        return length if self.text_length is None else min(length, self.text_length)

    @property
    def _scaled_length(self) -> int:
        if self.rope.stated_scaled or self.rope.kind not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        factor = self.rope.scaling.get("factor")
        if not isinstance(factor, int | float):
            return self.max_position_embeddings  # yarn's own, or refused in rotary
        original = self.rope.scaling.get("original_max_position_embeddings")
        base = self.max_position_embeddings if original is None else int(original)
        scaled = int(base * factor)
        return max(self.max_position_embeddings, scaled)
