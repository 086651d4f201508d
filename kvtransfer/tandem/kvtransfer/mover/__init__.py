"""Transfer thread: executes the state machines' actions.

Only it calls transports and owns P's exports or D's pulls. It naps while bytes move, and sleeps on
its queue otherwise.
"""
