"""Settings of `tandem node-agent`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.base.settings import check_optional_integer, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAgentConfig:
    """Settings of the node agent."""

    kv_node_folder: str | None = setting(
        None,
        "Folder that workers of this machine share with the agent. Default: a temporary folder "
        "of the user.",
    )
    agent_group: int | None = setting(
        None,
        "Number of a group whose members may also call the agent. Default: only workers of this "
        "user.",
    )
    host: str = setting("127.0.0.1", "Address of --probe-port; it serves counters only.")
    probe_port: int | None = setting(
        None,
        "Port of /health, /metrics, /debug (HTTP), 0 for any. Default: no port.",
    )
    status: bool = setting(False, "Print the counters of the running agent as JSON.")

    def __post_init__(self) -> None:
        check_optional_integer("agent_group", self.agent_group, 0)
        check_optional_integer("probe_port", self.probe_port, 0, 65535)
