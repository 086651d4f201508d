"""What the router reports: metrics, timelines, the live page."""
