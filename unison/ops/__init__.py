"""Numerical operators: the only code that touches an activation, in rollout and in training.

Every operator promises that an output row is a function of its own inputs alone, bit for bit:
not of the other rows, how many there are, or the thread count. On stock PyTorch that promise is
kept by padding (see ``padding``); ``selftest`` proves it on the machine at hand.
"""
