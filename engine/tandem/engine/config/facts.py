"""Shape of a model, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.engine.config.scheduler import PROMPT_CUTS, SchedulerConfig
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import ModelPooling

if TYPE_CHECKING:
    from tandem.engine.config.cache import CacheConfig

FP8_BLOCK = (128, 128)
"""Outputs and inputs that share a scale."""
_FIELD = "config.json: quantization_config"
_FP8: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": (list(FP8_BLOCK),),
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
}
"""Supported values by key; a last None allows that the key is absent."""
_NEAREST = (
    "; the nearest is the same model in bfloat16, in fp8 with blocks of 128 by 128 (as Qwen3-8B-FP8"
    " is), or as a GGUF file, whose weights are converted"
)
_KEPT = ("modules_to_not_convert", "ignored_layers")
"""Keys of layers that are left plain, of transformers and vLLM."""


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """Weights in fp8 e4m3 with a scale for each block of 128 by 128; activations are not
    quantized."""

    kept: tuple[str, ...] = ()
    """Prefixes of layers whose weights are plain."""
    at_load: bool = False
    """Whether the checkpoint's weights are plain and rounded when they are loaded."""

    def keeps(self, prefix: str) -> bool:
        return any(prefix == each or prefix.startswith(f"{each}.") for each in self.kept)


def quantization_of(config: Mapping[str, Any]) -> QuantFacts | None:
    """Return the form of a parsed config.json's weights; None is plain. Raises InvalidParameter."""
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise InvalidParameter(_FIELD, found, "an object")
    for name, allowed in _FP8.items():
        if found.get(name) not in allowed:
            words = ", ".join(str(each) for each in allowed if each is not None)
            raise InvalidParameter(f"{_FIELD}.{name}", found.get(name), f"one of {words}{_NEAREST}")
    unknown = sorted(
        name
        for name, value in found.items()
        if name not in _FP8 and name not in _KEPT and value not in (None, False)
    )
    if unknown:
        known = ", ".join((*_FP8, *_KEPT))
        raise InvalidParameter(f"{_FIELD}.{unknown[0]}", found[unknown[0]], f"only {known}")
    return QuantFacts(tuple(name for key in _KEPT for name in _names(found, key)))


def _names(found: Mapping[str, Any], key: str) -> list[str]:
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InvalidParameter(f"{_FIELD}.{key}", names, "a list of names of layers")
    return names


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
    linear: LinearAttentionFacts | None = None
    """Facts of STATE layers."""
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
