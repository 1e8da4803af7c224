"""Advantage estimators: from the rewards of a batch to one advantage for each token. One file, one family."""
