"""Settings of a worker's listening sockets and of its drain."""

from dataclasses import dataclass

from tandem.base.listening import PLAINTEXT_HELP, check_exposed
from tandem.base.settings import check_integer, setting
from tandem.engine.stat_loggers import INTERVAL_S
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import PROBE_PORT, WORKER_PORT
from tandem.tracing.config import TracingConfig

QUEUE_LIMITS = {"max_num_queued_reqs": 8_192, "max_num_queued_tokens": 64_000_000}
"""Engine settings of a worker: requests and prompt tokens that wait for their first step. Further
ones are refused, and routers place them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(TracingConfig):
    """Settings of the shell around an EngineCore, the same for both roles."""

    host: str = setting(
        "127.0.0.1",
        "Address for routers and probes. Addresses other than loopback require CURVE keys.",
    )
    port: int = setting(WORKER_PORT, "Port for routers (ZMQ).")
    probe_port: int = setting(PROBE_PORT, "Port of /health, /ready, /metrics, /debug (HTTP).")
    drain_seconds: float = setting(
        30.0,
        "Time for running requests after SIGTERM. The rest continue on other workers. A second "
        "signal ends at once.",
        unit="s",
    )
    curve_keys: str | None = setting(
        None,
        "Folder with this role's CURVE key pair. Default: links without authentication and "
        "encryption.",
    )
    curve_peers: str | None = setting(
        None, "Folder with the public keys of all roles, in files ROLE.GENERATION.public."
    )
    allow_plaintext: bool = setting(False, PLAINTEXT_HELP)
    log_stats_interval: float = setting(
        INTERVAL_S, "Interval of log lines with the engine's statistics. 0: none.", unit="s"
    )
    log_level: str = setting(
        "info", "Lowest level of messages to log.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "text", "Format of log lines: text, or one JSON object each.", choices=("text", "json")
    )

    def __post_init__(self) -> None:
        TracingConfig.__post_init__(self)
        check_exposed("host", self.host, curve=self.has_curve, allow_plaintext=self.allow_plaintext)
        check_integer("port", self.port, 0, 65535)
        check_integer("probe_port", self.probe_port, 0, 65535)
        if not 0 <= self.log_stats_interval <= 86_400:
            raise InvalidParameter(
                "log_stats_interval", self.log_stats_interval, "seconds from 0 to 86400"
            )
        if not 0 <= self.drain_seconds <= 3600:
            raise InvalidParameter("drain_seconds", self.drain_seconds, "seconds from 0 to 3600")

    @property
    def has_curve(self) -> bool:
        """Return whether keys are given; KeyRing checks that they can be read."""
        return self.curve_keys is not None and self.curve_peers is not None
