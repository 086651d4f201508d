"""Logits → tokens and log-probabilities, stage by stage, in the order that the design fixes.

Public: ``SamplingBatch``, the persistent columns of parameters, a row per sequence, and
``Sampler(vocab_size).sample(logits, batch, rows=, positions=, choices=) -> SamplerOutput``, with
``choose_alike`` for the part that a CUDA graph can hold; ``prompt_logprobs`` and ``score_prompt``
for the prompt's positions. A draw depends on the seed, the choice, the output position, the purpose
and the logits, and on nothing else: not on batch, row order or worker. Called by
tandem.engine.worker's ModelRunner.
"""

from tandem.engine.sample.batch import SamplingBatch, SamplingKind
from tandem.engine.sample.logprobs import LogprobTensors, prompt_logprobs, score_prompt
from tandem.engine.sample.sampler import Sampler, SamplerOutput

__all__ = [
    "LogprobTensors",
    "Sampler",
    "SamplerOutput",
    "SamplingBatch",
    "SamplingKind",
    "prompt_logprobs",
    "score_prompt",
]
