"""Held-out accuracy with intervals, tied to a weight version."""
