"""The operator: one LLMService becomes router, prefill and decode pods, and stays that way.

``api/`` holds the custom resources' types without kopf or kubernetes, ``desired/`` the pure
builders of children, ``rollout`` and ``status`` the pure decisions; the rest talks to a cluster.
Started by ``tandem operator``.
"""
