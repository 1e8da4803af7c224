"""pass@k: how often at least one of k samples of a problem passes."""

from __future__ import annotations

from unison.core.errors import ConfigError


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k of one problem from n samples, c of which passed (Chen et al. 2021).

    The share of the k-subsets of the samples that hold a pass, 1 - C(n-c, k) / C(n, k), as a product of k
    factors in [0, 1]: no binomial is ever formed, so nothing overflows. Raises ConfigError for k outside [1, n].
    """
    if not 1 <= k <= num_samples:
        raise ConfigError(f"pass@{k} cannot be estimated from {num_samples} samples; k must be 1 to {num_samples}")
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"{num_passed} of {num_samples} samples cannot have passed")
    none_passes = 1.0
    for i in range(k):
        none_passes *= max(0, num_samples - num_passed - i) / (num_samples - i)
    return 1.0 - none_passes
