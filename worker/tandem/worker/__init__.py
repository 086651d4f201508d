"""Worker process around an engine: step loop, links to routers, probes, signals and drain."""
