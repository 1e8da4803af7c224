"""Clients of servers: one that samples, one that controls, and the fleet of a training run."""
