"""The router: OpenAI HTTP over ``AsyncLLM(Dispatcher)``, with placement, retries and flow
control.
"""
