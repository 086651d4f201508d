"""Code of both ends of links: routers and workers, prefill and decode workers.

No torch: only protocol, msgspec, pyzmq and the standard library. Import from the modules.
"""
