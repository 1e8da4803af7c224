"""The weight path: an update is a transaction that is committed whole or not at all."""
