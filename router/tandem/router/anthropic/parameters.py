"""Parameters of Anthropic's API that this server does not support: see openai/parameters."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.router.openai.bodies.parameters import Refused

_NO_TOOLS = "tools are run by the client"

TOOL: Mapping[str, Refused] = {
    "allowed_callers": Refused(_NO_TOOLS, (["direct"],)),
}

COUNT: Mapping[str, Refused] = {
    "workspace_id": Refused("there are no workspaces"),
}

MESSAGES: Mapping[str, Refused] = {
    **COUNT,
    "container": Refused(_NO_TOOLS),
    "inference_geo": Refused("the cluster is where it is"),
}
