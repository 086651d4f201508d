"""What surrounds the capture of graphs, without a GPU."""

import gc
import logging
import re

import pytest
import torch

from tandem.engine.worker.graphs import captures

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch):
    """Bytes that a device has free: less after each look."""
    seen = [3 << 30, 1 << 30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (seen.pop(0), 4 << 30))


def test_the_log_says_how_many_graphs_there_are_and_what_they_took(free, caplog):
    """Those that the block has put into the dict, and the memory that went meanwhile."""
    graphs: dict[int, str] = {}
    with caplog.at_level(logging.INFO), captures("steps", graphs, CPU):
        assert not gc.isenabled()
        graphs.update({1: "one", 2: "two"})
    assert gc.isenabled()
    assert re.search(r"CUDA graphs of steps: 2 in [0-9.]+ s, 2\.00 GiB", caplog.text)


def test_memory_that_torch_would_keep_for_later_is_not_counted(monkeypatch, caplog):
    """Whether it was kept before the captures or through them: each graph's work is run once."""
    free, kept = [3 << 30], [1 << 30]

    def give_back() -> None:
        free[0] += kept[0]
        kept[0] = 0

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 4 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    with caplog.at_level(logging.INFO), captures("choices", {}, CPU):
        free[0], kept[0] = 1 << 30, 2 << 30
    assert "1.00 GiB" in caplog.text


def test_garbage_is_collected_again_after_a_capture_that_failed(free):
    """The worker that says why it cannot start goes on until it has."""
    with pytest.raises(RuntimeError, match="no room"), captures("steps", {}, CPU):
        raise RuntimeError("no room")
    assert gc.isenabled()
