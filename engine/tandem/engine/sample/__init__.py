"""Logits to tokens and log-probabilities, stage by stage.

``SamplingBatch`` holds parameters by row; ``Sampler.sample`` draws. A draw depends on seed, choice,
output position, purpose and logits only, not on batch, row order or worker.
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
