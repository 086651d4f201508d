"""Configuration of one engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import (
    dataclass,
    field,
    fields,
    replace,
)
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tandem.base.settings import (
    Setting,
    check_choices,
    setting,
    settings_of,
)
from tandem.engine.config.cache import FP8, GPU_BLOCK_SIZE, CacheConfig, GPUConfig
from tandem.engine.config.facts import ModelFacts, check_settings
from tandem.engine.config.kv_scales import KVScales, digest_of, read_kv_scales, rows_of
from tandem.engine.config.layout import LayerGroup, layer_groups
from tandem.engine.config.model import DTYPES, ModelConfig
from tandem.engine.config.parallel import ParallelConfig, check_ranks
from tandem.engine.config.quantization import QuantFacts
from tandem.engine.config.read import CONFIG, read_facts
from tandem.engine.config.scheduler import (
    CPU_LEAST_MIXED_TOKENS,
    CPU_MIXED_TOKENS_PER_DECODE,
    CPU_NUM_SEQS,
    GPU_BATCHED_TOKENS,
    GPU_IDLE_POLL_MS,
    GPU_LEAST_MIXED_TOKENS,
    GPU_MIXED_TOKENS_PER_DECODE,
    SchedulerConfig,
)
from tandem.engine.config.structured_outputs import StructuredOutputsConfig
from tandem.engine.config.weight_files import indexed, unindexed
from tandem.protocol.card import FP8_CODES, Fingerprint, KVKind, KVLayout
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import ALL_LOGPROBS

_HEAD_BYTES = 1 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def revision_of(model: ModelConfig) -> str:
    """Return 32 hex digits of the folder's content, or of the seed of dummy weights."""
    digest = blake2b(digest_size=16, person=b"tandem-revision")
    folder = Path(model.model)
    config = folder / CONFIG
    if config.is_file():
        digest.update(config.read_bytes())
    if model.load_format == "dummy":
        digest.update(f"dummy {model.seed}".encode())
        return digest.hexdigest()
    for path in _loaded(folder):
        digest.update(path.name.encode())
        digest.update(_sampled(path))
    return digest.hexdigest()


def _loaded(folder: Path) -> list[Path]:
    try:
        owners = indexed(folder)
    except ValueError:
        return []
    files = unindexed(folder) if owners is None else sorted(set(owners.values()))
    return [each for each in files if each.is_file()]


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for index in range(_SAMPLES):
            file.seek(size * (index + 1) // (_SAMPLES + 1), os.SEEK_SET)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Profiles that an administrator requests (`/start_profile`, `LLM.start_profile`)."""

    torch_profiler_dir: str | None = setting(
        None,
        "Folder for profiles of torch's profiler, in Chrome's trace format. Default: profiles "
        "are disabled.",
    )


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "scheduler": SchedulerConfig,
    "gpu": GPUConfig,
    "structured_outputs": StructuredOutputsConfig,
    "profiler": ProfilerConfig,
}
"""Field of EngineConfig to the class of its settings."""
GPU_DEFAULTS: dict[str, Any] = {
    "block_size": GPU_BLOCK_SIZE,
    "max_num_batched_tokens": GPU_BATCHED_TOKENS,
    "async_scheduling": True,
    "idle_poll_ms": GPU_IDLE_POLL_MS,
    "mixed_tokens_per_decode": GPU_MIXED_TOKENS_PER_DECODE,
    "least_mixed_tokens": GPU_LEAST_MIXED_TOKENS,
}
CPU_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": CPU_NUM_SEQS,
    "mixed_tokens_per_decode": CPU_MIXED_TOKENS_PER_DECODE,
    "least_mixed_tokens": CPU_LEAST_MIXED_TOKENS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine with the facts of its model. Make it with ``of``."""

    model: ModelConfig
    facts: ModelFacts
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    gpu: GPUConfig
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    kv_scales: KVScales = field(default_factory=dict)
    """Scales of the checkpoint for KV in fp8."""
    device: str = setting(
        "auto",
        "Device of the model; auto: cuda if there is a GPU.",
        choices=("auto", "cpu", "cuda"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _check_length(self.model, self.facts)
        check_ranks(
            self.parallel.tensor_parallel_size,
            self.facts,
            device=self.device,
            offloads=self.cache.kv_offloading_size is not None,
        )
        if self.facts.encoder is not None:
            check_settings(self.cache, self.scheduler)
            if self.model.enable_prompt_embeds:
                allowed = "false: an encoder's prompts are texts or token ids"
                raise InvalidParameter("enable_prompt_embeds", True, allowed)
            self._check_step()
        if self.scheduler.speculative_config is not None:
            self._check_drafts()
        if self._rounds_at_load:
            self._check_rounding()
        if self.cache.kv_cache_dtype not in ("auto", FP8, self.dtype):
            allowed = f"auto, {FP8} or {self.dtype}, the model's"
            raise InvalidParameter("kv_cache_dtype", self.cache.kv_cache_dtype, allowed)
        if self.cache.kv_cache_dtype == FP8 and self.facts.latent is not None:
            allowed = f"auto or {self.dtype}: latents are not held as codes"
            raise InvalidParameter("kv_cache_dtype", FP8, allowed)

    @classmethod
    def of(cls, model: str | Path, *, facts: ModelFacts | None = None, **flat: Any) -> EngineConfig:
        """Return the config of the model in folder ``model``; ``flat`` are settings of any section
        by name.

        ``facts`` are read from the folder unless given. Raises InvalidParameter for an unknown name
        or value.
        """
        device = resolve_device(flat.pop("device", "auto"))
        given = {name: value for name, value in flat.items() if value is not None}
        flat = {**flat, **defaults_of(device), **given}
        parts = _sort_into_sections({"model": str(model), **flat})
        settings = ModelConfig(**parts["model"])
        facts = facts if facts is not None else read_facts(model)
        if settings.quantization == "fp8":
            facts = replace(facts, quantization=_rounded_at_load(facts.quantization))
        scales: KVScales = {}
        if settings.load_format != "dummy" and facts.encoder is None:
            scales = read_kv_scales(Path(model), facts.num_kv_heads)
        return cls(
            model=settings,
            facts=facts,
            kv_scales=scales,
            cache=CacheConfig(**parts["cache"]),
            parallel=ParallelConfig(**parts["parallel"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
            gpu=GPUConfig(**parts["gpu"]),
            structured_outputs=StructuredOutputsConfig(**parts["structured_outputs"]),
            profiler=ProfilerConfig(**parts["profiler"]),
            device=device,
        )

    def with_(self, **flat: Any) -> EngineConfig:
        device = resolve_device(flat.pop("device", self.device))
        changes: dict[str, Any] = {
            section: replace(getattr(self, section), **values)
            for section, values in _sort_into_sections(flat).items()
            if values
        }
        return replace(self, device=device, **changes)

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of prompt and output together."""
        asked = self.model.max_model_len or self.facts.derived_max_len
        if self.facts.encoder is None:
            return asked
        return min(asked, self.scheduler.max_num_batched_tokens)

    @property
    def enable_prefix_caching(self) -> bool:
        """Return whether KV is kept for equal prefixes; never for an encoder."""
        return self.cache.enable_prefix_caching and self.facts.encoder is None

    @property
    def embeds_size(self) -> int | None:
        """Return the values of each vector of a prompt of embeddings; None if not accepted."""
        return self.facts.hidden_size if self.model.enable_prompt_embeds else None

    @property
    def max_logprobs(self) -> int:
        """Return the most tokens with logprobs per position: at most the vocabulary."""
        most, vocabulary = self.model.max_logprobs, self.facts.vocab_size
        return vocabulary if most == ALL_LOGPROBS else min(most, vocabulary)

    @property
    def served_model_name(self) -> str:
        return self.model.served_model_name or Path(self.model.model).name

    @property
    def dtype(self) -> str:
        """Return the resolved type of weights and activations, one of ``DTYPES``."""
        if self.model.dtype != "auto":
            return self.model.dtype
        return self.facts.dtype if self.facts.dtype in DTYPES else "float32"

    @property
    def kv_dtype(self) -> str:
        """Return the type of keys and values; states are float32."""
        return FP8_CODES if self.cache.kv_cache_dtype == FP8 else self.dtype

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups of one rank's KV cache with their layers."""
        return layer_groups(
            self.facts,
            block_size=self.cache.block_size,
            dtype=self.kv_dtype,
            ranks=self.parallel.tensor_parallel_size,
        )

    @property
    def row_scales(self) -> tuple[tuple[float, ...], ...]:
        """Return the scales of codes by group of the first rank, one of each ``num_rows``."""
        return tuple(
            sum(rows_of(self.kv_scales, each.layers, range(each.group.num_kv_heads)), ())
            if each.group.kind in (KVKind.FULL, KVKind.WINDOW)
            else (1.0,) * each.group.num_rows
            for each in self.layer_groups
        )

    @property
    def layout(self) -> KVLayout:
        """Return the layout of one rank's KV cache. An encoder's blocks have no bytes."""
        return KVLayout(tuple(each.group for each in self.layer_groups))

    @property
    def revision(self) -> str:
        return self.model.revision or revision_of(self.model)

    @property
    def _rounds_at_load(self) -> bool:
        return self.facts.quantization is not None and self.facts.quantization.at_load

    def _check_rounding(self) -> None:
        if self.facts.encoder is not None or self.facts.linear is not None:
            kind = "recurrent states" if self.facts.encoder is None else "an encoder"
            allowed = f"auto: weights of a model with {kind} are plain"
            raise InvalidParameter("quantization", self.model.quantization, allowed)

    def _check_step(self) -> None:
        asked, most = self.model.max_model_len, self.scheduler.max_num_batched_tokens
        if asked is not None and asked > most:
            allowed = (
                f"at most max_num_batched_tokens={most}: an encoder computes a prompt in one step"
            )
            raise InvalidParameter("max_model_len", asked, allowed)

    def _check_drafts(self) -> None:
        states = any(each.kind is KVKind.STATE for each in self.layout.groups)
        if states or self.facts.encoder is not None:
            kind = "recurrent states" if states else "an encoder"
            allowed = f"none: a model with {kind} takes no drafts"
            raise InvalidParameter("speculative_config", self.scheduler.speculative_config, allowed)

    def fingerprint(self, layout: KVLayout | None = None) -> Fingerprint:
        """Return the fingerprint that workers must share to exchange KV. Reads files: call once."""
        form = "+fp8" if self._rounds_at_load else ""
        scales = f"+kv{digest}" if (digest := digest_of(self.kv_scales)) else ""
        return Fingerprint(
            revision=f"{self.revision}{form}{scales}",
            dtype=self.dtype,
            layout=layout if layout is not None else self.layout,
            tensor_parallel_size=self.parallel.tensor_parallel_size,
        )


def engine_settings() -> Iterator[Setting]:
    """Yield every setting of the engine; names are unique over all sections."""
    for section in SECTIONS.values():
        yield from settings_of(section)
    yield from settings_of(EngineConfig)


def resolve_device(device: str) -> str:
    """Resolve ``auto`` to this machine's device without torch; else return ``device``."""
    if device != "auto":
        return device
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return "cpu"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def defaults_of(device: str) -> dict[str, Any]:
    """Return the device's defaults."""
    return GPU_DEFAULTS if device == "cuda" else CPU_DEFAULTS


def _sort_into_sections(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    owners = {each.name: section for section, config in SECTIONS.items() for each in fields(config)}
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in flat.items():
        if name not in owners:
            raise InvalidParameter(name, value, f"one of {', '.join(sorted(owners))}, device")
        parts[owners[name]][name] = value
    return parts


def _check_length(model: ModelConfig, facts: ModelFacts) -> None:
    asked, longest = model.max_model_len, facts.derived_max_len
    if asked is not None and asked > longest:
        raise InvalidParameter(
            "max_model_len", asked, f"at most {longest}, the context length of the model"
        )


def _rounded_at_load(found: QuantFacts | None) -> QuantFacts:
    """Return the form that ``quantization`` fp8 makes of a checkpoint's. Raises InvalidParameter
    for another form of weights than fp8."""
    if found is None:
        return QuantFacts(at_load=True)
    if not found.is_fp8:
        allowed = "auto: the checkpoint states another form in its quantization_config"
        raise InvalidParameter("quantization", "fp8", allowed)
    return found
