"""Chaos from the command line.

    python -m tests.chaos line --requests 10000 --seed 1        a stack of this project, raised here
    python -m tests.chaos blackbox --url URL --model NAME --pids prefill=123,decode=456

The last line says whether all held; the exit status is 0 or 1.
"""

import sys
from pathlib import Path

from tests.chaos.commands import main

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the stack, for `line`
    sys.exit(main(sys.argv[1:]))
