"""The state of a whole run, saved atomically and with digests."""
