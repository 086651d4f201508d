"""How a supervisor on this machine tells its own process from a stranger on the same port.

It gives each process a token in the environment, and the process repeats it in the header of
``/ready``. Called by the router and by workers' probes; checked by cli/.
"""

import os

ENV_CHILD_TOKEN = "TANDEM_CHILD_TOKEN"
HEADER_CHILD_TOKEN = "Tandem-Child"


def child_headers() -> dict[str, str]:
    """The header for ``/ready``; nothing where no supervisor gave a token."""
    token = os.environ.get(ENV_CHILD_TOKEN)
    return {HEADER_CHILD_TOKEN: token} if token else {}
