"""The rollout engine: requests in, sampled tokens with their log-probs out. Knows nothing of training."""
