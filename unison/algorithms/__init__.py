"""Pure tensor functions of reinforcement learning: advantages, policy losses, KL, aggregation, metrics.

They keep no state, know no model, and compute in float32 or wider whatever they are given.
"""
