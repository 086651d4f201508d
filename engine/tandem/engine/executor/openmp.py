"""How long torch's idle CPU threads spin before they sleep; set before torch is loaded.

Between two ops of a step the OpenMP threads wait for each other. By default they spin for
milliseconds, which takes the cores from whoever else needs them: on two cores, a decode step of
SmolLM2 took 46 ms with the default and 37 ms with this, and many times that when two workers
computed side by side.
"""

import os

SPIN_COUNT = "1000"
"""A few microseconds: longer than the gap between two ops, shorter than anybody notices."""


def limit_spinning() -> None:
    """Set GNU OpenMP's spin count for this process unless the user has."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
