"""The router: OpenAI HTTP over ``AsyncLLM(Dispatcher)``; placement, failure ladder, flow control.

No torch, no engine. ``app.create_app`` composes it; cli/ runs it under uvicorn.
"""
