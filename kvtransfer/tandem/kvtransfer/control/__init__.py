"""The control plane: ZMQ links to peers, their HELLOs, beats and ends.

One thread at a time touches the sockets: the transfer thread while it has nothing else to do, else
the control thread, which stands by. What concerns a hand-off goes to the transfer thread's queue in
the order of arrival, link changes included; what the transfer thread says goes out on the link
that it meant, or nowhere.
"""
