"""What a model's text says: content, reasoning and calls of tools, told apart as it comes.

One engine reads every format; a format is a table in ``formats``.
"""
