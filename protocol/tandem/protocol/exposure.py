"""Addresses that other machines can reach, and the check before one is used in clear text.

Links between Tandem's own processes carry prompts, answers and commands such as DRAIN. Without
CURVE they are neither authenticated nor encrypted. They stay on the loopback unless a flag, of the
same name in every process, allows more. Used by the config classes of workers and routers.
"""

import ipaddress

from tandem.protocol.errors import InvalidParameter

REMEDY = "or CURVE keys (--curve-keys, --curve-peers), or --allow-plaintext"
PLAINTEXT_HELP = (
    "Speak with other machines without CURVE: whoever reaches the port may send work, read KV and "
    "drain the worker."
)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or ``localhost``. Other names return False."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def check_exposed(param: str, host: str, *, curve: bool, allow_plaintext: bool) -> None:
    """Raise InvalidParameter for another host without CURVE or ``allow_plaintext``."""
    if not (curve or allow_plaintext or is_loopback(host)):
        raise InvalidParameter(param, host, f"a loopback address, {REMEDY}")
