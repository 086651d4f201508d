"""What is run before a worker is ready, so that nothing is compiled later, in a request."""

from dataclasses import replace

import pytest
import torch
from tests.engine_run.run_driver import Driver
from tests.engine_run.tiny_models import folder_of

from tandem.engine.models.decoder import Decoder
from tandem.engine.worker.profile import largest_steps, load_kernels, shortened
from tandem.kernels.sampling import keep_bits, penalize


def test_every_number_of_prompts_and_of_draws_is_run(monkeypatch):
    """By powers of two, as kernels are built by them, and the most that there can be; each step
    within its budget of tokens."""
    driver = Driver(folder_of("llama"), num_blocks=8, max_num_seqs=11)
    runner, steps, draws = driver.runner, [], []
    hidden, logits = runner.hidden, runner.model.logits

    def step(inputs):
        steps.append((len(inputs.sequences.seq_lens), len(inputs.positions)))
        return hidden(inputs)

    def draw(rows):
        draws.append(len(rows))
        return logits(rows)

    of_model = type(runner.model)

    monkeypatch.setattr(type(runner), "hidden", lambda _, inputs, *_more: step(inputs))
    monkeypatch.setattr(of_model, "logits", lambda _, rows: draw(rows))
    load_kernels(driver.config, runner, torch.device("cpu"))
    assert draws == [1, 2, 4, 8, 11]
    assert [count for count, _ in steps[:5]] == draws
    budget = driver.config.scheduler.max_num_batched_tokens
    assert all(count <= tokens <= budget for count, tokens in steps)
    # 3 query heads of a KV head: 63 of 64 rows are 21 tokens.
    short = [(count, longest) for longest in (1, 2, 4, 8, 16) for count in (1, 11)]
    assert [(count, tokens - count + 1) for count, tokens in steps[5:]] == short


def test_the_largest_step_is_one_of_all_its_tokens(monkeypatch):
    """As few prompts as can be, as long as the model takes them: memory is kept for that."""
    driver = Driver(
        folder_of("llama"), num_blocks=8, max_num_seqs=3, max_num_batched_tokens=700, block_size=64
    )
    runner, steps = driver.runner, []
    hidden = runner.hidden

    def step(inputs):
        steps.append(inputs.sequences.seq_lens.tolist())
        return hidden(inputs)

    monkeypatch.setattr(type(runner), "hidden", lambda _, inputs, *_more: step(inputs))
    largest_steps(driver.config, runner, torch.device("cpu"))
    assert driver.config.max_model_len == 512
    assert steps[0] == [512, 188]


def test_the_kernels_of_rules_are_run(monkeypatch):
    """The first request with a penalty, or a long list of allowed ids, would wait for one to be
    compiled, and all that run beside it."""
    driver = Driver(folder_of("llama"), num_blocks=8, max_num_seqs=3)
    penalized: list[tuple[int, list[int]]] = []
    allowed: list[list[int]] = []

    def noted(logits, penalties):
        penalized.append((len(logits), penalties.rows.tolist()))
        penalize(logits, penalties)

    def bounded(logits, words, rows):
        allowed.append(rows.tolist())
        keep_bits(logits, words, rows)

    monkeypatch.setattr("tandem.engine.sample.edits.penalize", noted)
    monkeypatch.setattr("tandem.engine.sample.edits.keep_bits", bounded)
    largest_steps(driver.config, driver.runner, torch.device("cpu"))
    assert penalized == [(3, [0, 1, 2]), (1, [0])]
    assert allowed == [[0, 1, 2], [0]]


def test_a_short_model_runs_both_kinds_of_layers_and_is_put_back():
    """The last layer is unlike the others, and so is the first that attends to a batch; whatever
    happens meanwhile, the whole model returns."""
    driver = Driver(folder_of("llama"), num_blocks=8, max_num_seqs=2)
    runner, model = driver.runner, driver.runner.model
    assert isinstance(model, Decoder)
    runner.model = whole = replace(model, layers=model.layers[:1] * 3 + model.layers)
    seen = []

    def within():
        with shortened(runner):
            seen.append(runner.model)
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        within()
    (short,) = seen
    assert isinstance(short, Decoder)
    assert short.layers == whole.layers[-3:]
    assert runner.model is whole
