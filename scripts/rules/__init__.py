"""Recording rules and alerts of the chart: read, checked and tried by promtool."""
