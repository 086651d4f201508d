"""Batches through a whole engine in this process: scheduler, cache, client, text."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine_plan.sim import SimExecutor

from tandem.llm import LLM, progress
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import FinishReason
from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    """The embedded model's folder and a pretended model: 64 blocks of 16 tokens."""
    with LLM(
        str(smollm2),
        executor=SimExecutor(64, verify=True),
        device="cpu",
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    ) as llm:
        yield llm


def test_a_batch_is_answered_in_order(llm: LLM) -> None:
    """More prompts than run at once, of both kinds, each as if it were alone."""
    prompts: list[Any] = [f"prompt number {n} " * (n % 5 + 1) for n in range(30)]
    prompts[7] = [5, 6, 7]
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}

    outputs = llm.generate(prompts, params, use_tqdm=False)

    assert [output.prompt for output in outputs] == [*prompts[:7], None, *prompts[8:]]
    assert {len(output.outputs[0].token_ids) for output in outputs} == {5}
    assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.LENGTH}
    for index in (0, 7, 29):
        alone = llm.generate(prompts[index], params, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == outputs[index].outputs[0].token_ids
        shown = llm.tokenizer.decode(list(alone.outputs[0].token_ids))
        assert alone.outputs[0].text == shown


def test_the_tokens_are_the_models(smollm2: Path) -> None:
    """Scheduler, cache and text change nothing of what the model draws."""
    executor = SimExecutor(32, verify=True)
    params = SamplingParams(seed=5, max_tokens=9, temperature=0.7)
    with LLM(str(smollm2), executor=executor, device="cpu", block_size=16) as llm:
        output = llm.generate("hello there", params, use_tqdm=False)[0]

        drawn, _ = executor.model.generate(
            output.prompt_token_ids,
            params,
            eos=llm.tokenizer.eos_token_ids,
            max_model_len=llm.card.max_model_len,
        )
    assert list(output.outputs[0].token_ids) == drawn


def test_the_models_own_max_tokens_give_way_to_the_context(smollm2: Path) -> None:
    """A prompt that leaves no room for so many is answered all the same."""
    tokenizer = Tokenizer.load(str(smollm2))
    tokenizer.generation = {"max_new_tokens": 30}
    with LLM(
        str(smollm2),
        executor=SimExecutor(64),
        tokenizer=tokenizer,
        device="cpu",
        block_size=16,
        max_model_len=128,
    ) as llm:
        open_ended = {"ignore_eos": True}
        params: list[Any] = [open_ended, open_ended, SamplingParams(ignore_eos=True)]
        answers = llm.generate([[5] * 120, [5] * 10, [5] * 10], params, use_tqdm=False)

    assert [len(each.outputs[0].token_ids) for each in answers] == [8, 30, 118]


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    """One for all or one each; another number is refused."""
    each = [{"max_tokens": n, "ignore_eos": True} for n in (1, 2, 3)]

    outputs = llm.generate(["a", "b", "c"], each, use_tqdm=False)

    assert [output.num_generated_tokens for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidParameter, match=r"^sampling_params: '3 of them'"):
        llm.generate(["a", "b"], each)


def test_choices_share_one_request(llm: LLM) -> None:
    """``n`` answers, drawn apart, in order."""
    params = {"n": 3, "max_tokens": 4, "seed": 1, "temperature": 1.0, "ignore_eos": True}

    output = llm.generate("hi", params, use_tqdm=False)[0]

    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    assert output.num_generated_tokens == 12


def test_chats_come_alone_or_in_lists(llm: LLM) -> None:
    """A chat is a list of messages, several are a list of lists."""
    chat = [{"role": "user", "content": "hi"}]

    one = llm.chat(chat, {"max_tokens": 2}, use_tqdm=False)
    two = llm.chat([chat, chat], {"max_tokens": 2}, use_tqdm=False)

    assert (len(one), len(two)) == (1, 2)
    assert one[0].prompt == two[1].prompt == llm.tokenizer.render_chat(chat)


def test_a_prompt_that_does_not_fit_ends_the_batch(llm: LLM) -> None:
    """Nothing of it goes on, and the next batch is served."""
    prompts: list[str | list[int]] = ["a", [1] * 9000, "b"]

    with pytest.raises(ContextLengthExceeded):
        llm.generate(prompts, use_tqdm=False)
    with pytest.raises(InvalidParameter, match=r"^messages"):
        llm.chat([], use_tqdm=False)

    assert not llm.engine.has_unfinished_requests
    assert len(llm.generate("a", {"max_tokens": 1}, use_tqdm=False)) == 1


def test_stop_strings_free_the_engine(llm: LLM) -> None:
    """A request that text ended holds no block afterwards: a full batch follows."""
    text = (
        llm.generate("x", {"temperature": 0, "max_tokens": 40}, use_tqdm=False)[0].outputs[0].text
    )
    params = {"temperature": 0, "max_tokens": 900, "stop": text[3:5]}

    outputs = llm.generate(["x"] * 8, params, use_tqdm=False)

    for output in outputs:
        assert output.outputs[0].finish_reason == FinishReason.STOP
        assert text.startswith(output.outputs[0].text + text[3:5])


def test_a_line_counts_requests_where_there_is_no_terminal(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the error stream, so that output may be piped."""
    llm.generate(["a", "b"], {"max_tokens": 1})

    shown = capfd.readouterr()
    assert "2/2" in shown.err
    assert "tokens/s" in shown.err
    assert shown.out == ""


def test_without_rich_there_are_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, too, and no error."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    with progress.BatchProgress(3, shown=True) as bar:
        bar.done(5)

    out, err = capfd.readouterr()
    assert out == ""
    assert "1/3 requests" in err


def test_lines_come_while_the_first_request_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """By what the engine has answered so far: a batch of one long request is not silent."""
    outputs = iter(range(0, 10_000, 50))
    written = threading.Event()

    def num_outputs() -> int:
        number = next(outputs)
        if number >= 200:
            written.set()
        return number

    with progress.BatchProgress(1, shown=True, num_outputs=num_outputs, every=0.01):
        assert written.wait(30)

    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("tandem: 0/1 requests answered in") for line in lines)


def test_nothing_is_written_where_progress_is_turned_off(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate("a", {"max_tokens": 1}, use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_an_engine_setting_that_does_not_exist_is_named(smollm2: Path) -> None:
    """Settings are the engine's, by their flat names."""
    with pytest.raises(
        InvalidParameter, match="no option 'max_num_seq'; the nearest is 'max_num_seqs'"
    ):
        LLM(str(smollm2), executor=SimExecutor(8), max_num_seq=3)
