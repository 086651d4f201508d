"""Process that renders one chat template from a client: ``python -m`` this, once.

It reads a job from standard input and writes the result to standard output, both JSON. The parent
enforces the deadline.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions, ChatTemplates


def limit_memory(num_bytes: int) -> None:
    """Limit the total memory of this process, and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def render(job: dict[str, Any]) -> dict[str, Any]:
    """Return ``text``, or ``param`` and ``allowed`` of the error."""
    try:
        templates = ChatTemplates({}, job["named_tokens"])
        text = templates.render(job["messages"], ChatOptions(**job["options"]))
    except InvalidParameter as error:
        return {"param": error.param, "allowed": error.allowed}
    except (MemoryError, RecursionError) as error:
        return {"param": "chat_template", "allowed": f"a smaller template: {type(error).__name__}"}
    if len(text) > job["max_chars"]:
        return {
            "param": "chat_template",
            "allowed": f"a template that renders at most {job['max_chars']} characters",
        }
    return {"text": text}


def main() -> None:
    """Run the job."""
    job = json.loads(sys.stdin.buffer.read())
    limit_memory(job["memory_bytes"])
    sys.stdout.write(json.dumps(render(job)))


if __name__ == "__main__":
    main()
