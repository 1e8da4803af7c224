"""Isolation of untrusted code: run a program with nothing of this machine in reach, within limits."""
