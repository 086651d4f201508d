"""Settings of `tandem up` and `tandem serve`, checked before anything is prepared or started."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.hub.source import DEFAULT_MODEL
from tandem.protocol.names import ROUTER_PORT
from tandem.protocol.settings import check_choices, check_integer, check_positive, setting

MAX_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of a local stack."""

    model: str = setting(
        DEFAULT_MODEL, "Folder, GGUF file, hub id, or package:NAME of an installed package."
    )
    revision: str | None = setting(None, "Revision of a hub id.")
    served_model_name: tuple[str, ...] = setting(
        (), "Names under which the model is served, one or several; answers have the first."
    )
    prefill: int = setting(1, "Prefill workers; 0 serves without hand-off.")
    decode: int = setting(
        1, "Decode workers; 0 gives vectors and scores alone, by prefill workers."
    )
    host: str = setting("127.0.0.1", "Address on which the router listens.")
    port: int = setting(ROUTER_PORT, "Port on which the router listens.")
    worker_flags: str = setting("", "Further flags for every worker, as one string.")
    prefill_flags: str = setting("", "Further flags for prefill workers, as one string.")
    decode_flags: str = setting("", "Further flags for decode workers, as one string.")
    router_flags: str = setting("", "Further flags for the router, as one string.")
    ready_seconds: float = setting(
        300.0, "Give up if the processes, once started, cannot serve by then.", unit="s"
    )
    log_level: str = setting(
        "info",
        "Least severe messages to show of the processes.",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text", "Lines of text, or a JSON object a line.", choices=("text", "json")
    )

    def __post_init__(self) -> None:
        check_integer("prefill", self.prefill, 0, MAX_WORKERS)
        check_integer("decode", self.decode, 0 if self.prefill else 1, MAX_WORKERS)
        check_integer("port", self.port, 1, 65535)
        check_positive("ready_seconds", self.ready_seconds)
        check_choices(self)
