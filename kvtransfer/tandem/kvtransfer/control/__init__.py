"""Control plane: ZMQ links to peers, their HELLOs, beats and ends.

One thread at a time uses the sockets: an idle transfer thread, else the control thread. Messages
and link changes reach the transfer thread in order of arrival. Its own are sent on the link that it
named, or dropped.
"""
