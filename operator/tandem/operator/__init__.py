"""The operator: makes router, prefill and decode pods of an LLMService, and keeps them so.

``api/`` has the resources' types, ``desired/`` builds children, ``decide/`` decides; both are pure.
"""
