"""HTTP/1.1 connections, limits, error bodies, and middleware."""
