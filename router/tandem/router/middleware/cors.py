"""CORS: the requests that web pages of other origins may make; none unless origins are given.

The layer itself is Starlette's. It answers preflight requests, which have no key, before keys are
checked, and lets pages read every answer, also errors.
"""

from __future__ import annotations

from typing import Any

from tandem.router.config import RouterConfig

EXPOSED = ("X-Request-Id", "X-Tandem-Ignored", "Retry-After")
"""Headers of answers that scripts may read in addition to those that browsers always expose."""


def cors_options(config: RouterConfig) -> dict[str, Any]:
    """Return the arguments of Starlette's ``CORSMiddleware``."""
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": config.allowed_methods,
        "allow_headers": config.allowed_headers,
        "allow_credentials": config.allow_credentials,
        "expose_headers": EXPOSED,
    }
