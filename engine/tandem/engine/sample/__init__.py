"""Logits → tokens and log-probabilities: one stage a file, in the order that the design fixes.

Public: ``SamplingBatch``, the persistent columns of parameters, a row per sequence, and
``Sampler(vocab_size).sample(logits, batch, draws) -> SamplerOutput``; ``prompt_logprobs`` for the
prompt's positions. A draw depends on (seed, choice, output position, purpose) and the logits, on
nothing else: not on batch, row order or worker. Called by tandem.engine.worker's ModelRunner.
"""
