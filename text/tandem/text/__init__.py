"""Conversion between a client's text and an engine's token ids, without torch."""
