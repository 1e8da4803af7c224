"""Shared records, errors and protocols. Imports neither torch nor any other part of Unison."""
