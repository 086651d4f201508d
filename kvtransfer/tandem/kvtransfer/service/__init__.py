"""Public classes of kvtransfer; see kvtransfer/README.md for the contract.

Every method is for the engine's thread and returns at once; each class has a control and a transfer
thread.
"""
