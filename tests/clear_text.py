"""Requests without TLS, by httpx: a client of its own for each, as httpx.get and post have it, but
without the 50 ms that reading all authorities of the web takes, and with a busy machine's time."""

from __future__ import annotations

import ssl
from functools import partial

import httpx

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody."""
get = partial(httpx.get, verify=NO_TLS, timeout=60)
post = partial(httpx.post, verify=NO_TLS, timeout=60)
