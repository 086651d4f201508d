"""The process of a worker: step loop, links to routers, probes, signals, drain; an engine inside."""
