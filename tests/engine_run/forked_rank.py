"""An executor whose rank is forked of a process that has imported what ranks import."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import cast

from tests.forked import fork_server

from tandem.engine.executor.multiproc import MultiprocExecutor


class ForkedExecutor(MultiprocExecutor):
    """Its process begins behind the imports, which are most of what a start costs."""

    def launch(self, descriptor: int) -> subprocess.Popen[bytes]:
        if sys.platform != "linux":
            return super().launch(descriptor)
        forked = fork_server("rank").fork([], os.environ, output=2, beside=[descriptor])
        return cast("subprocess.Popen[bytes]", forked)
