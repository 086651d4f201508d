"""HTTP/1.1 connections, limits, error bodies, and what each request passes first."""
