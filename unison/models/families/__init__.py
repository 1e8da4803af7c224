"""One file per family: how its config.json reads as a spec."""
