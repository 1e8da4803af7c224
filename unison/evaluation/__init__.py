"""Held-out sets, answered under one weight version; accuracy and pass@k with their intervals."""
