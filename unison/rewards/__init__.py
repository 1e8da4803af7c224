"""Rewards: loading reward functions, and scoring samples so that a failure stays with its sample."""
