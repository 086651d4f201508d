"""What a step does beyond the forward pass: rows, draws, scores, forks, preemption."""

import pytest
import torch
from tests.engine_run.run_driver import GREEDY, Driver
from tests.engine_run.tiny_models import folder_of, judge_of, judged

from tandem.engine.step import SchedulerOutput, SeqId
from tandem.protocol.sampling import SamplingParams

PROMPT = list(range(20, 61))
RANDOM = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def driver():
    """One engine for the module: tests leave no sequence behind that matters."""
    return Driver(folder_of("llama"), num_blocks=200)


def test_a_seeded_draw_does_not_depend_on_the_batch(driver):
    """Alone, among others, in other chunks: the same seed gives the same tokens."""
    (alone,) = driver.generate([driver.add(PROMPT, RANDOM)], 12)
    others = [driver.add(range(5, 5 + n), GREEDY) for n in (3, 50)]
    seqs = [others[0], driver.add(PROMPT, RANDOM), others[1]]
    assert driver.generate(seqs, 12, budget=9)[1] == alone
    (other_seed,) = driver.generate(
        [driver.add(PROMPT, SamplingParams(temperature=0.9, top_p=0.95, seed=12))], 12
    )
    assert other_seed != alone


def test_a_resumed_sequence_goes_on_as_it_would_have(driver):
    """Emitted tokens given with the prompt are not redrawn, and the next draws are the same."""
    (whole,) = driver.generate([driver.add(PROMPT, RANDOM)], 12)
    seq = driver.add(PROMPT + whole[:5], RANDOM, num_prompt=len(PROMPT))
    (resumed,) = driver.generate([seq], 12)
    assert resumed == whole


def test_preempted_rows_are_computed_again(driver):
    """A dropped sequence that comes back under another id and other blocks draws on."""
    penalised = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.3, min_tokens=3)
    (whole,) = driver.generate([driver.add(PROMPT, penalised)], 10)
    seq = driver.add(PROMPT, penalised)
    driver.generate([seq], 4)
    line = driver.drop(seq)
    again = driver.add(line.tokens, penalised, num_prompt=len(PROMPT))
    assert driver.generate([again], 10) == [whole]


def test_prompt_logprobs_are_transformers(driver):
    """Every prompt token but the first is scored, however the prompt is cut."""
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=2)
    seq = driver.add(PROMPT, params)
    scores = []
    for count in (13, 1, 20, 7):
        out = driver.step((seq, count))
        scores += out.prompt_logprobs.get(seq, ())
    with torch.inference_mode():
        logits = judge_of("llama")(torch.tensor([PROMPT])).logits[0]
    want = logits.log_softmax(-1)
    assert [each.token_id for each in scores] == PROMPT[1:]
    for at, each in enumerate(scores):
        assert each.logprob == pytest.approx(want[at, each.token_id].item(), abs=1e-4)
        assert each.top_ids == tuple(want[at].topk(2).indices.tolist())
        assert each.top_logprobs == pytest.approx(want[at].topk(2).values.tolist(), abs=1e-4)


def test_logprobs_come_with_their_tokens(driver):
    """A row that asks gets its token's score; one that does not gets none."""
    asked = driver.add(PROMPT, SamplingParams(temperature=0.0, seed=0, logprobs=1))
    silent = driver.add(PROMPT)
    out = driver.step((asked, len(PROMPT)), (silent, len(PROMPT)))
    by_seq = {each.seq: each for each in out.sampled}
    assert by_seq[silent].logprobs is None
    ((score,),) = by_seq[asked].logprobs
    assert score.token_id == by_seq[asked].token_ids[0][0]
    assert score.rank == 1
    assert score.top_ids == (score.token_id,)


def test_n_first_tokens_come_from_one_row(driver):
    """All choices are drawn at the prompt's end, and each is what its own sequence would draw."""
    params = SamplingParams(temperature=1.0, seed=5, n=3)
    alone = []
    for choice in range(3):
        alone += driver.generate([driver.add(PROMPT, params, choice=choice)], 1)
    seq = driver.add(PROMPT, params)
    out = driver.step((seq, len(PROMPT)), choices={seq: (0, 1, 2)})
    (sampled,) = out.sampled
    assert sampled.choices == (0, 1, 2)
    assert [list(tokens) for tokens in sampled.token_ids] == alone
    assert driver.lines[seq].output == alone[0]


def test_forked_blocks_are_copied_before_they_are_written(driver):
    """A fork that shares full blocks and copies the last goes on as its source does."""
    source = driver.add(PROMPT)
    driver.generate([source], 3)
    line = driver.lines[source]
    fork = driver.add(line.tokens, GREEDY, num_prompt=len(PROMPT))
    other = driver.lines[fork]
    fresh = driver._free.pop()
    other.blocks = [*line.blocks[:-1], fresh]
    other.computed = line.computed
    new = driver._introduce(fork, other, list(other.blocks))
    copied = SchedulerOutput(
        step=1000, rows=(), new=(new,), block_copies=((line.blocks[-1], fresh),)
    )
    driver.executor.execute(copied).result()
    assert driver.generate([source, fork], 8) == [judged("llama", PROMPT, 8)[0]] * 2


def test_a_step_may_only_drop(driver):
    """A plan without rows drops what it names; ids that were never held are no error."""
    seq = driver.add(PROMPT)
    driver.step((seq, 5))
    held = len(driver.runner.batch.row_of)
    driver.drop(seq)
    out = driver.executor.execute(SchedulerOutput(7, (), (), (seq, SeqId(10**6)))).result()
    assert out.step == 7
    assert out.sampled == ()
    assert out.fence.done()
    assert len(driver.runner.batch.row_of) == held - 1


def test_rows_are_used_again():
    """As many sequences as rows, over and over, more tokens and blocks than there was room for."""
    driver = Driver(folder_of("llama"), num_blocks=120, max_num_seqs=2)
    prompts = [[(7 * i + j) % 300 + 5 for j in range(150 * i + 5)] for i in range(3)]
    for prompt in prompts:
        seqs = [driver.add(prompt), driver.add(prompt[:4])]
        got = driver.generate(seqs, 6, budget=64)
        assert got == [judged("llama", prompt, 6)[0], judged("llama", prompt[:4], 6)[0]]
        for seq in seqs:
            driver.drop(seq)
    for _ in range(2):
        driver.step((driver.add(PROMPT), 1))
    with pytest.raises(AssertionError, match="max_num_seqs"):
        driver.step((driver.add(PROMPT), 1))
