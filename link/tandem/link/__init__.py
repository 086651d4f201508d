"""What ends of links share: routers and workers, prefill and decode workers.

No torch, and nothing but protocol, msgspec, pyzmq and the standard library. Import from the
modules.
"""
