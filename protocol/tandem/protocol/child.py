"""Token by which a supervisor recognises its own process on a port of this machine.

The supervisor gives each process a token in the environment. The process repeats it in the header
of ``/ready``. Used by the router and by workers' probes; checked by cli/.
"""

import os

ENV_CHILD_TOKEN = "TANDEM_CHILD_TOKEN"
HEADER_CHILD_TOKEN = "Tandem-Child"


def child_headers() -> dict[str, str]:
    """Return the header for ``/ready``; empty if no supervisor set a token."""
    token = os.environ.get(ENV_CHILD_TOKEN)
    return {HEADER_CHILD_TOKEN: token} if token else {}
