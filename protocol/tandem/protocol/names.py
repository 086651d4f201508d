"""Names that two images must agree on: ports, environment variables, labels."""

ROUTER_PORT = 8000
WORKER_PORT = 5570
"""ZMQ ROUTER socket of a worker, for routers."""
CONTROL_PORT = 5580
"""ZMQ ROUTER socket of a prefill worker, for decode workers."""
DATA_PORT = 5590
"""First port of the KV data path (tcp transport; NIXL chooses its own unless fenced)."""
PROBE_PORT = 8001
"""HTTP /health /ready /metrics of a worker."""

ENV_PREFIX = "TANDEM_"
"""Each flag ``--some-flag`` may be given as ``TANDEM_SOME_FLAG``."""
ENV_CACHE = "TANDEM_CACHE"

LABEL_ROLE = "tandem.dev/role"
LABEL_SERVICE = "tandem.dev/service"
LABEL_REVISION = "tandem.dev/revision"
