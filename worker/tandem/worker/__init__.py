"""A worker's process: step loop, links to routers, probes, signals, drain; an engine inside."""
