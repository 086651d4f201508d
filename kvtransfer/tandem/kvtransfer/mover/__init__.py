"""The transfer thread: executes what the machines ask for.

It alone calls a transport and owns P's exports or D's pulls. It sleeps on its queue: short naps
while bytes are on their way, none at all when idle.
"""
