"""Names that two images share: ports, environment variables, labels."""

ROUTER_PORT = 8000
GRPC_PORT = 50051
"""Default gRPC port of a router, if a service has one."""
WORKER_PORT = 5570
"""Default port of a worker, for routers."""
CONTROL_PORT = 5580
"""Default port of a prefill worker, for decode workers."""
DATA_PORT = 5590
"""First port of the KV data path."""
PROBE_PORT = 8001
"""Default port of a worker's /health, /ready and /metrics."""

ENV_PREFIX = "TANDEM_"
"""Prefix of the environment variable of a flag."""
ENV_CACHE = "TANDEM_CACHE"

LABEL_ROLE = "tandem.dev/role"
LABEL_SERVICE = "tandem.dev/service"
LABEL_REVISION = "tandem.dev/revision"

# What a pod is given on Kubernetes; docs/kubernetes.md is the page of this contract.

DATA_PORTS = 16
"""Number of ports from DATA_PORT on."""

LABEL_APP = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_MODEL = "tandem.dev/model"
"""Digest of the model's source; routers discover only workers with their own."""

ANNOTATION_ADMITTED = "tandem.dev/admitted"
"""``true`` on a worker pod admits its revision. If no pod has it, every revision is admitted."""
ANNOTATION_WIRE = "tandem.dev/wire"
"""``card.WIRE`` of the release that made a pod's template; absent in earlier ones."""
ANNOTATION_DRAINING = "tandem.dev/draining"
"""``true`` on a worker pod that is about to be deleted."""
ANNOTATION_KEYS_WANTED = "tandem.dev/keys-wanted"
"""Changed on pods that lack new public keys, so that the kubelet updates their files."""

ENV_POD_NAME = "TANDEM_POD_NAME"
ENV_POD_UID = "TANDEM_POD_UID"
ENV_POD_NAMESPACE = "TANDEM_POD_NAMESPACE"
ENV_POD_IP = "TANDEM_POD_IP"
ENV_NODE_NAME = "TANDEM_NODE_NAME"
ENV_SERVICE = "TANDEM_SERVICE"
ENV_ROLE_REVISION = "TANDEM_ROLE_REVISION"
ENV_CURVE_KEYS = "TANDEM_CURVE_KEYS"
"""Folder of this role's key pair; absent means no CURVE."""
ENV_CURVE_PEERS = "TANDEM_CURVE_PEERS"
"""Folder of the public keys of all roles, files ``ROLE.GENERATION.public``."""
ENV_DISCOVERY_SELECTOR = "TANDEM_DISCOVERY_SELECTOR"
"""Label selector of worker pods; absent: workers are those of ``--workers``."""
ENV_LIMITS = "TANDEM_LIMITS"
"""Limits of a router as a YAML mapping; its ``--limits-file`` has precedence."""
ENV_API_KEYS_DIR = "TANDEM_API_KEYS_DIR"
"""Folder of accepted API keys, one per file."""
ENV_ADMIN_API_KEYS_DIR = "TANDEM_ADMIN_API_KEYS_DIR"
"""Folder of administration keys, one per file."""
ENV_CANARY_TOKEN_FILE = "TANDEM_CANARY_TOKEN_FILE"
"""File with the token that a canary sends in HEADER_CANARY."""
"""Folder that all pods of a node share; absent means that there is none."""

PATH_CURVE_KEYS = "/etc/tandem/keys"
CURVE_PUBLIC_FILE = "curve.public"
CURVE_SECRET_FILE = "curve.secret"
PATH_CURVE_PEERS = "/etc/tandem/peers"
PATH_API_KEYS = "/etc/tandem/api-keys"
PATH_ADMIN_API_KEYS = "/etc/tandem/admin-api-keys"
PATH_CANARY = "/etc/tandem/canary"
CANARY_TOKEN_FILE = "token"
PATH_MODELS = "/models"
PATH_CACHE = "/cache"
PATH_NODE = "/run/tandem/node"
"""Folder of a service on the node, shared by its workers."""
PATH_NODE_AGENT = "/run/tandem/node-agent"
"""Folder of the node's agent, read-only for workers."""
AGENT_FOLDER = "agent"
"""Folder of the agent in the node's volume."""

EXIT_MODEL_REFUSED = 3
"""Exit status of ``tandem prepare`` if the model is missing or unsupported."""

HEADER_CANARY = "Tandem-Canary"
"""Token of a canary, which passes API keys and user metrics and may set the headers below."""
HEADER_SHAPE = "Tandem-Shape"
"""Requested and reported shape: ``disaggregated`` or ``aggregated``."""
HEADER_PREFILL_REVISION = "Tandem-Prefill-Revision"
HEADER_DECODE_REVISION = "Tandem-Decode-Revision"
"""Request: use only workers of this revision. Response: the revision that served."""
