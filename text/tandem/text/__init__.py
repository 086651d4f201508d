"""Text in, text out: conversion between a client's text and an engine's token ids.

No torch, pydantic, asyncio or transformers: the router's image includes this package. All calls are
synchronous. Import from the modules.
"""
