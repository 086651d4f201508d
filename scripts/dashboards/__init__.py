"""Grafana's boards, written with Grafana's own types; the chart holds the JSON made of them."""
