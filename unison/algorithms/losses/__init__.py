"""Policy losses: from log-probs and advantages to what is minimised, token by token. One file, one family."""
