"""The router: OpenAI HTTP over ``AsyncLLM(Dispatcher)``; placement, failure retry policy, flow
control.

No torch, no engine. ``app.create_app`` composes it; cli/ runs it under uvicorn.
"""
