"""Parsers that split a model's text into content, reasoning and tool calls as it is generated.

One engine reads every format; a format is a table in ``formats``.
"""
