"""A package of logits processors, written to a folder as an installer would leave it."""

from __future__ import annotations

from pathlib import Path

NAME = "tandem_test_plugin"
CODE = '''
"""Two processors: one that changes which token is the best, one that does not."""

from tandem.engine.logits_processors import LogitsProcessor
from tandem.protocol.errors import InvalidParameter


class Only(LogitsProcessor):
    """``only_token``: that one, but after it has come ``only_times`` times another."""

    ARGUMENTS = ("only_token", "only_times")
    looks_back = True

    def __init__(self, context):
        super().__init__(context)
        self.rows = {}

    @classmethod
    def check(cls, params):
        token = params.extra_args.get("only_token")
        if not isinstance(token, int) or token < 0:
            raise InvalidParameter("vllm_xargs.only_token", token, "a token id")

    def add(self, row, params, prompt, output):
        args = params.extra_args
        self.rows[row] = [args["only_token"], args.get("only_times", 1 << 30)]
        self.extend(row, output)

    def extend(self, row, token_ids):
        self.rows[row][1] -= len(token_ids)

    def remove(self, row):
        del self.rows[row]

    def apply(self, logits, rows):
        for at, row in enumerate(rows):
            token, left = self.rows[row]
            if left > 0:
                logits[at] = float("-inf")
                logits[at, token] = 0.0
            else:
                logits[at, token] = float("-inf")


class Sharp(LogitsProcessor):
    """``sharpness``: logits times it."""

    ARGUMENTS = ("sharpness",)
    keeps_argmax = True
    calls = 0

    def __init__(self, context):
        super().__init__(context)
        self.rows = {}

    def add(self, row, params, prompt, output):
        self.rows[row] = float(params.extra_args["sharpness"])

    def remove(self, row):
        del self.rows[row]

    def apply(self, logits, rows):
        Sharp.calls += 1
        for at, row in enumerate(rows):
            logits[at] *= self.rows[row]


class Twin(Only):
    """Reads what Only reads."""
'''


def write_plugin(folder: Path, *, entry_points: bool = True) -> Path:
    """The folder, which goes on ``sys.path``."""
    (folder / f"{NAME}.py").write_text(CODE)
    if entry_points:
        info = folder / f"{NAME}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        offered = f"only = {NAME}:Only\nsharp = {NAME}:Sharp\n"
        (info / "entry_points.txt").write_text(f"[tandem.logits_processors]\n{offered}")
    return folder
