"""The control thread: ZMQ links to peers, their HELLOs, beats and ends.

It alone touches the sockets. What concerns a hand-off goes to the transfer thread's queue in
the order of arrival, link changes included; what the transfer thread says goes out on the link
that it meant, or nowhere.
"""
