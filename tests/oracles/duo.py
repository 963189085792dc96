"""DuoAttention (arXiv:2410.10819): heads by the quantile of their numbers, rows of both kinds of heads."""

import numpy as np


def duo_kinds(pattern, sparsity):
    """For each layer and kv head, True where the number reaches numpy's quantile, as the published code decides.

    Args:
        pattern: [L][K] numbers, no two equal after they are cut to [0, 1].
        sparsity: share of streaming heads; 0 and 1 mean none and all.
    """
    numbers = np.clip(np.asarray(pattern, np.float64), 0, 1)
    threshold = -1 if sparsity <= 0 else 2 if sparsity >= 1 else np.quantile(numbers, sparsity)
    return (numbers >= threshold).tolist()


def duo(pattern, sparsity, n, sinks, window):
    """Positions that every kv head holds when a text of n tokens has been read, prompt or answer.

    Returns:
        [L][K] ascending lists.
    """
    few = [j for j in range(n) if j < sinks or j >= n - window]
    return [
        [list(range(n)) if full else few for full in row] for row in duo_kinds(pattern, sparsity)
    ]
