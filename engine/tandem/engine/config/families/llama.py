"""Llama and those that share its code: SmolLM2, Mistral."""

from __future__ import annotations

from tandem.engine.config.families.base import Family


class Llama(Family):
    """Llama and Mistral. Biases follow config.json; most checkpoints have none.

    Mistral's sliding window needs no code: the engine's config admits no sequence longer than the
    window, within which the window and full attention are the same.
    """

    architectures = ("LlamaForCausalLM", "MistralForCausalLM")
