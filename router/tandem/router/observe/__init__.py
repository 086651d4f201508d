"""Reports of the router: metrics, timelines, the live page."""
