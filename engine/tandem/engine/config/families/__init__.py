"""Models that can be computed, by their config.json; checked without torch, also when they are
fetched.

A family is a file of this folder and its class in ``_ALL``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families.base import Family
from tandem.engine.config.families.bert import Bert, ColBert, Roberta
from tandem.engine.config.families.gemma import Gemma3
from tandem.engine.config.families.llama import Llama, Mistral, Qwen2, Qwen3
from tandem.engine.config.families.qwen3_5 import Qwen3_5
from tandem.protocol.errors import InvalidParameter

_MISSING = {
    "a mixture of experts": "MoE|Moe|Mixtral|Deepseek|DeepSeek|GptOss|Dbrx|Grok|Llama4|OlmoE"
    "|Phimoe|MiniMax|Kimi|HunYuan|Arctic",
    "images": "VL|Vision|Llava|LLaVA|Pixtral|Mistral3|Idefics|Mllama|Paligemma|PaliGemma|Fuyu"
    "|InternVL|Qwen3_5ForCond|Gemma3ForCond|Gemma3nForCond|Phi3V|Phi4MM|Molmo|Ovis|CLIP|Clip|Siglip|ViT",
    "audio": "Whisper|Audio|Ultravox|Voxtral|Omni|Wav2Vec|Speech",
    "layers that keep a recurrent state": "Mamba|Jamba|Bamba|Rwkv|RWKV|NemotronH|Zamba"
    "|RecurrentGemma|Qwen3Next|GraniteMoeHybrid|FalconH1|Plamo2|Lfm2",
    "a decoder that attends to an encoder": "^(T5|MT5|UMT5|Bart|MBart|Marian|Pegasus|M2M100"
    "|NllbMoe|LongT5|Florence)|EncoderDecoder",
    "latent attention": "DeepseekV2|DeepseekV3|MiniCPM3|LongcatFlash",
}
"""Unsupported features, each with a pattern of class names that require it."""
_SIMILAR = {
    "Mixtral": "Mistral",
    "Ministral": "Mistral",
    "Pixtral": "Mistral",
    "Mllama": "Llama",
    "Llava": "Llama",
    "SmolLM3": "Llama",
    "DistilBert": "Bert",
    "ModernBert": "Bert",
    "NomicBert": "Bert",
    "Deberta": "Roberta",
    "MPNet": "Roberta",
    "Qwen2_5": "Qwen2",
    "Qwen": "Qwen3",
}
"""Nearest family by beginning of a class name; the longest beginning counts."""
_ENCODER = re.compile(r"Bert|BERT|Electra|MPNet|Deberta|Roberta|XLNet|Albert|GTE|New(Model|For)")


def explained(architecture: str, served: Iterable[str]) -> str:
    """Return the allowed values for an error about ``architecture``: what it lacks, and the nearest
    of ``served``."""
    names = list(served)
    missing = [what for what, pattern in _MISSING.items() if re.search(pattern, architecture)]
    lacks = f"{' and '.join(missing)} cannot be computed yet; " if missing else ""
    return f"{lacks}the nearest is {_nearest(architecture, names)}; one of {', '.join(names)}"


def _nearest(architecture: str, served: list[str]) -> str:
    family = re.match(r"XLM|[A-Z][a-z]*\d*", architecture)
    near = [name for name in served if family and name.startswith(family[0])]
    for start in sorted(_SIMILAR, key=len, reverse=True):
        if not near and architecture.startswith(start):
            near = [name for name in served if name.startswith(_SIMILAR[start])]
    if not near:
        near = [name for name in served if name.startswith("Bert")]
        near = near if _ENCODER.search(architecture) else served
    same = [name for name in near if _ending(name) == _ending(architecture)]
    return (same or near)[0]


def _ending(name: str) -> str:
    found = re.search(r"For[A-Z]\w*$|LMHeadModel$|Model$", name)
    return found[0].replace("LMHeadModel", "ForCausalLM") if found else ""


__all__ = ["FAMILIES", "Family", "check_architecture", "check_servable", "family_of"]

_ALL: tuple[type[Family], ...] = (
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
    Qwen3_5,
    Bert,
    Roberta,
    ColBert,
)
FAMILIES: dict[str, Family] = {
    name.removesuffix(each.saved_as[0]) + sibling: each()
    for each in _ALL
    for name in each.architectures
    for sibling in each.saved_as
}


def family_of(architecture: str) -> Family:
    """Return the family; for an unknown architecture a plain one, which ``check_servable``
    refuses."""
    return FAMILIES.get(architecture) or Family()


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raise InvalidParameter if no family computes the architecture of a parsed config.json. Call
    it first: other architectures have other keys."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if isinstance(first, str) and first not in FAMILIES:
        raise InvalidParameter("config.json: architectures", first, explained(first, FAMILIES))


def check_servable(facts: ModelFacts) -> None:
    """Raise InvalidParameter, naming the field, for a model that no family computes."""
    check_architecture({"architectures": [facts.architecture]})
    FAMILIES[facts.architecture].check(facts)
