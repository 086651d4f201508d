"""Both ends of links between routers and workers, and between prefill and decode workers."""
