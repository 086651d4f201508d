"""Text in, text out: what stands between a client's words and an engine's token ids.

No torch, pydantic, asyncio or transformers: the router's image holds it, and a call returns when
its work is done. Import from the modules.
"""
