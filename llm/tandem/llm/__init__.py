"""Text in, text out over any engine: ``AsyncLLM``, ``LLMEngine``, and ``LLM`` for offline batches.

The router serves through ``AsyncLLM`` over its dispatcher, so no module here imports an engine but
``offline``, and that one lazily. Import from the modules; ``LLM`` is in ``tandem.llm.offline``.
"""
