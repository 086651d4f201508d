"""Commands that show a running server: top, explain."""
