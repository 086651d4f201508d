"""One rank: its weights, its KV cache, and the steps that it runs."""

from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.worker import Worker

__all__ = ["LaunchedStep", "Worker"]
