"""Settings of the served model and its types of numbers."""

from dataclasses import dataclass

from tandem.base.settings import (
    check_choices,
    check_flag,
    check_integer,
    check_optional_integer,
    required,
    setting,
)
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import ALL_LOGPROBS, DEFAULT_MAX_LOGPROBS

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model's folder and the settings of its reading."""

    model: str = required(
        "Folder (config.json, tokenizer.json, safetensors), GGUF file, id on the Hugging Face "
        "hub, or package:NAME of an installed package."
    )
    served_model_name: str | None = setting(
        None, "Name of the model in requests. Default: the folder's name."
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations; auto: that of the checkpoint.",
        choices=("auto", *DTYPES),
        aliases=DTYPE_ALIASES,
    )
    quantization: str = setting(
        "auto",
        "Form of linear layers' weights; auto: the checkpoint's. fp8: plain weights are rounded at "
        "load, with a scale per 128 by 128.",
        choices=("auto", "fp8"),
    )
    max_model_len: int | None = setting(
        None,
        "Maximum length of prompt and output together. Default: the model's.",
        unit="tokens",
    )
    seed: int = setting(
        0,
        "Seed of dummy weights. In a program (LLM) also of requests without a seed; routers give"
        " those random seeds.",
    )
    load_format: str = setting(
        "auto",
        "Source of weights. dummy: random weights in the shapes of config.json.",
        choices=("auto", "safetensors", "dummy"),
    )
    max_logprobs: int = setting(
        DEFAULT_MAX_LOGPROBS,
        "Maximum number of log-probabilities per position in a request. -1: the whole "
        "vocabulary, which is expensive for the router.",
    )
    enable_prompt_embeds: bool = setting(
        False,
        "Accept prompts as embeddings (prompt_embeds). ",
    )
    max_held_embeds_bytes: int = 1 << 30
    """Bytes of prompts of embeddings that wait or run, together; beyond it a request is refused,
    unless it is the only one."""
    logits_processors: tuple[str, ...] = setting(
        (),
        "Class of a logits processor, as module:Class; repeatable. Entry points "
        "tandem.logits_processors of installed packages are always loaded.",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a hub id; digest of weights and config of a folder. "
        "Default: computed. Only workers of one revision exchange KV.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidParameter("model", self.model, "the path of a prepared folder")
        check_choices(self)
        check_optional_integer("max_model_len", self.max_model_len, 1)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_flag("enable_prompt_embeds", self.enable_prompt_embeds)
        check_integer("max_held_embeds_bytes", self.max_held_embeds_bytes, 1)
        check_integer("max_logprobs", self.max_logprobs, ALL_LOGPROBS)
