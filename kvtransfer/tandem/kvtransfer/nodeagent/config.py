"""Settings of `tandem node-agent`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.settings import check_optional_integer, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAgentConfig:
    """Where the agent meets workers, and whose."""

    kv_node_folder: str | None = setting(
        None,
        "Folder in which workers of this machine meet the agent, the same for all of them; none is "
        "a folder of this user's own among the temporary files.",
    )
    agent_group: int | None = setting(
        None,
        "Number of a group whose members may call the agent, too: workers of other users. None is "
        "this user's workers alone.",
    )
    status: bool = setting(
        False, "Ask the agent that runs here how it is going, and print its counters as JSON."
    )

    def __post_init__(self) -> None:
        check_optional_integer("agent_group", self.agent_group, 0)
