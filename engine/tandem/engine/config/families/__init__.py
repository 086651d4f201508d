"""Models that can be computed, by their config.json; checked without torch, also when they are
fetched.

A family is a file of this folder and its class in ``_ALL``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from tandem.engine.config.facts import ModelFacts
from tandem.engine.config.families.base import Family
from tandem.engine.config.families.bert import Bert, ColBert, Roberta
from tandem.engine.config.families.cohere import Cohere2
from tandem.engine.config.families.deepseek import DeepseekV2, DeepseekV3
from tandem.engine.config.families.experts import check_experts
from tandem.engine.config.families.gemma import Gemma3
from tandem.engine.config.families.glm import Glm, Glm4
from tandem.engine.config.families.gpt_oss import GptOss
from tandem.engine.config.families.granite import Granite
from tandem.engine.config.families.llama import Llama, Mistral, Qwen2, Qwen3
from tandem.engine.config.families.mixtral import Mixtral
from tandem.engine.config.families.olmo import Olmo2, Olmo3
from tandem.engine.config.families.phi import Phi3
from tandem.engine.config.families.qwen3_5 import Qwen3_5
from tandem.engine.config.families.qwen_moe import Qwen2Moe, Qwen3Moe
from tandem.engine.config.families.smollm3 import SmolLM3
from tandem.engine.config.families.starcoder2 import Starcoder2
from tandem.protocol.errors import InvalidParameter

_MISSING = {
    "this mixture of experts": "MoE|Moe|DeepSeek|Dbrx|Grok|Llama4|OlmoE|Phimoe|MiniMax|Kimi"
    "|HunYuan|Arctic",
    "images": "VL|Vision|Llava|LLaVA|Pixtral|Mistral3|Idefics|Mllama|Paligemma|PaliGemma|Fuyu"
    "|InternVL|Qwen3_5ForCond|Gemma3ForCond|Gemma3nForCond|Phi3V|Phi4MM|Molmo|Ovis|CLIP|Clip|Siglip|ViT",
    "audio": "Whisper|Audio|Ultravox|Voxtral|Omni|Wav2Vec|Speech",
    "layers that keep a recurrent state": "Mamba|Jamba|Bamba|Rwkv|RWKV|NemotronH|Zamba"
    "|RecurrentGemma|Qwen3Next|GraniteMoeHybrid|FalconH1|Plamo2|Lfm2",
    "a decoder that attends to an encoder": "^(T5|MT5|UMT5|Bart|MBart|Marian|Pegasus|M2M100"
    "|NllbMoe|LongT5|Florence)|EncoderDecoder",
    "latent attention": "MiniCPM3|LongcatFlash",
    "attention in chunks": "Llama4",
    "heads of several widths, and values that are keys": "Gemma4",
    "KV that layers share": "Gemma3n",
}
"""Unsupported features, each with a pattern of class names that require it."""
_SIMILAR = {
    "Ministral": "Mistral",
    "Pixtral": "Mistral",
    "Mllama": "Llama",
    "Llava": "Llama",
    "ChatGLM": "Glm",
    "DistilBert": "Bert",
    "ModernBert": "Bert",
    "NomicBert": "Bert",
    "Deberta": "Roberta",
    "MPNet": "Roberta",
}
"""Nearest family by beginning of a class name that begins with no family's first word."""
_ENCODER = re.compile(r"Bert|BERT|Electra|MPNet|Deberta|Roberta|XLNet|Albert|GTE|New(Model|For)")


_END = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")


def explained(architecture: str, served: Iterable[str], model_type: object = None) -> str:
    """Return the allowed values for an error about ``architecture``: what it lacks, and the nearest
    of ``served``, also by the model_type of its config.json."""
    names = list(served)
    missing = [what for what, pattern in _MISSING.items() if re.search(pattern, architecture)]
    lacks = f"{' and '.join(missing)} cannot be computed yet; " if missing else ""
    nearest = _nearest(architecture, names, str(model_type).removesuffix("_text").replace("_", ""))
    return f"{lacks}the nearest is {nearest}; one of {', '.join(names)}"


def _nearest(architecture: str, served: list[str], model_type: str) -> str:
    """Return the name of ``served`` with the same first word and ending, and most in common."""
    stem = _END.sub("", architecture)
    word = re.match(r"XLM|[A-Z][a-z]+", stem)
    starts = [word[0]] if word else []
    starts += [own for start, own in _SIMILAR.items() if stem.startswith(start)]
    near = next((found for each in starts if (found := _beginning(each, served))), [])
    near = near or [name for name in served if _plain(name) == model_type]
    near = near or _beginning("Bert" if _ENCODER.search(architecture) else "Llama", served)
    same = [name for name in near if _ending(name) == _ending(architecture)]

    def common(name: str) -> int:
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, stem, strict=False))
        )

    return max(same or near, key=common)


def _plain(name: str) -> str:
    return _END.sub("", name).replace("_", "").lower()


def _beginning(word: str, served: list[str]) -> list[str]:
    return [name for name in served if name.startswith(word)]


def _ending(name: str) -> str:
    found = _END.search(name)
    return found[0].replace("LMHeadModel", "ForCausalLM") if found else ""


__all__ = ["FAMILIES", "Family", "check_architecture", "check_servable", "family_of"]

_ALL: tuple[type[Family], ...] = (
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma3,
    Qwen3_5,
    Phi3,
    Granite,
    Olmo2,
    Olmo3,
    SmolLM3,
    Glm,
    Glm4,
    Cohere2,
    Starcoder2,
    Qwen2Moe,
    Qwen3Moe,
    Mixtral,
    GptOss,
    DeepseekV2,
    DeepseekV3,
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
        allowed = explained(first, FAMILIES, config.get("model_type"))
        raise InvalidParameter("config.json: architectures", first, allowed)


def check_servable(facts: ModelFacts) -> None:
    """Raise InvalidParameter, naming the field, for a model that no family computes."""
    check_architecture({"architectures": [facts.architecture]})
    FAMILIES[facts.architecture].check(facts)
    check_experts(facts)
