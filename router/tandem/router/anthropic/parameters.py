"""Parameters that Anthropic's API knows and this server does not do: see openai/parameters."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.router.openai.bodies.parameters import Refused

_NO_TOOLS = "tools are run by the client"
_ONE = "there is one"

TOOL: Mapping[str, Refused] = {
    "allowed_callers": Refused(_NO_TOOLS, (["direct"],)),
    "defer_loading": Refused("all tools are told at once", (False,)),
    "eager_input_streaming": Refused("arguments come as the model writes them", (True,)),
    "input_examples": Refused("say it in the description", ([],)),
}

THINKING: Mapping[str, Refused] = {
    "display": Refused("reasoning is given whole, as the model wrote it"),
}

COUNT: Mapping[str, Refused] = {
    "speed": Refused(_ONE, ("standard",)),
    "user_profile_id": Refused("callers have no profiles"),
    "workspace_id": Refused("there are no workspaces"),
}

MESSAGES: Mapping[str, Refused] = {
    **COUNT,
    "container": Refused(_NO_TOOLS),
    "context_management": Refused("histories are the client's"),
    "diagnostics": Refused("there are none"),
    "inference_geo": Refused("the cluster is where it is"),
    "mcp_servers": Refused(_NO_TOOLS, ([],)),
    "service_tier": Refused(_ONE, ("auto", "standard_only")),
}
