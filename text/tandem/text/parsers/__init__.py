"""Parsers that split a model's text into content, reasoning and tool calls."""
