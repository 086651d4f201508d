"""What is refused before any work, in words that name the field and both lengths."""

import pytest
from tests.engine_plan.builders import EOS, VOCAB, Harness, params_of, request_of

from tandem.engine.scheduler.admission import Limits, admitted
from tandem.protocol.errors import Refusal, RefusalCode


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": []}, RefusalCode.INVALID, "prompt_token_ids"),
        ({"prompt": [1, VOCAB]}, RefusalCode.INVALID, "prompt_token_ids"),
        ({"prompt": [-1]}, RefusalCode.INVALID, "prompt_token_ids"),
        ({"params": params_of(temperature=9.0)}, RefusalCode.INVALID, "temperature"),
        ({"params": params_of(stop_token_ids=(VOCAB,))}, RefusalCode.INVALID, "stop_token_ids"),
        ({"params": params_of(logprobs=21)}, RefusalCode.INVALID, "logprobs"),
        ({"emitted": ((1,), (2,))}, RefusalCode.INVALID, "emitted"),
        ({"emitted": ((VOCAB,),)}, RefusalCode.INVALID, "emitted"),
        ({"finished_choices": (1,)}, RefusalCode.INVALID, "finished_choices"),
        ({"finished_choices": (0,)}, RefusalCode.INVALID, "finished_choices"),
        ({"adapter": "x"}, RefusalCode.UNSUPPORTED, "adapter"),
        ({"prompt": 64}, RefusalCode.NEVER_FITS, "prompt_token_ids"),
        ({"budget_ms": 0}, RefusalCode.EXPIRED, None),
    ],
)
def test_what_cannot_run_is_refused(fields, code, param):
    """Nothing is held for a refused request, and the refusal names the field."""
    harness = Harness(4)
    prompt = fields.pop("prompt", 20)

    refusal = harness.core.add(request_of("a", prompt, **fields))

    assert refusal is not None
    assert (refusal.code, refusal.param) == (code, param)
    assert not harness.core.has_work
    harness.core.check_integrity()


def test_a_prompt_that_never_fits_names_both_lengths():
    """The message has the prompt's length and what fits at most."""
    refusal = Harness(4).core.add(request_of("a", 70))

    assert refusal is not None
    assert "70 tokens" in refusal.message
    assert "at most 64" in refusal.message


@pytest.mark.parametrize(("length", "top", "most"), [(200_000, 20, 15), (30_000, 20, 20)])
def test_log_probabilities_of_a_prompt_fit_one_frame(length, top, most):
    """More than the link takes would cost the router its worker; a long prompt has fewer."""
    limits = Limits(max_model_len=1 << 21, vocab_size=VOCAB, max_logprobs=20)
    request = request_of("a", [1] * length, params=params_of(prompt_logprobs=top))

    told = admitted(request, limits)

    if top <= most:
        assert told is request
    else:
        assert isinstance(told, Refusal)
        assert (told.code, told.param) == (RefusalCode.INVALID, "prompt_logprobs")
        assert f"at most {most} for each of the prompt's {length} tokens" in told.message
    fits = request_of("a", [1] * length, params=params_of(prompt_logprobs=most))
    assert not isinstance(admitted(fits, limits), Refusal)


def test_a_prompt_may_be_too_long_for_any_log_probability():
    """Nothing is left to name but that."""
    limits = Limits(max_model_len=1 << 21, vocab_size=VOCAB, max_logprobs=20)
    request = request_of("a", [1] * 1_700_000, params=params_of(prompt_logprobs=0))

    told = admitted(request, limits)

    assert isinstance(told, Refusal)
    assert "none for a prompt of 1700000 tokens" in told.message


def test_the_longest_prompt_that_fits_runs():
    """One token of output is left for it, and no more."""
    harness = Harness(4)
    request = request_of("a", 63, params=params_of(ignore_eos=True))
    harness.add(request)
    harness.run()

    harness.check(request)
    assert len(harness.tokens("a")) == 1


def test_a_key_is_taken_once():
    """The same key is refused while it lives, and is free again afterwards."""
    harness = Harness()
    request = request_of("a")

    assert harness.add(request) is None
    assert harness.add(request) is RefusalCode.DUPLICATE
    assert harness.add(request_of("a", attempt=1)) is None
    harness.run()
    assert harness.add(request) is None


def test_end_of_sequence_ends_and_may_be_ignored():
    """EOS ids come with the request."""
    harness = Harness()
    requests = [
        request_of(f"s{seed}", 5, params=params_of(temperature=1.0, seed=seed, max_tokens=60))
        for seed in range(20)
    ]
    for request in requests:
        harness.add(request)
    harness.run()

    ends = [harness.tokens(request.key.request)[-1] for request in requests]
    assert set(EOS) & set(ends)
    for request in requests:
        harness.check(request)
