"""TriAttention's scores (arXiv:2604.04921) key by key, from its formula with complex numbers and angles; in float64."""

import cmath
import math

import numpy as np


def undo_rope(key, position, frequencies, factors):
    """Complex channel pairs `[D/2]`, (i, i + D/2), of a key before RoPE and its factors on cosine and sine."""
    half = len(key) // 2
    return [
        complex(key[f], key[f + half]) * cmath.exp(-1j * position * frequencies[f]) / factors[f]
        for f in range(half)
    ]


def query_statistics(q):
    """Complex means and mean norms `[D/2]` of the channel pairs of one head's unrotated queries `[n, D]`."""
    half = np.shape(q)[1] // 2
    pairs = [[complex(row[f], row[f + half]) for f in range(half)] for row in q]
    mean = [sum(row[f] for row in pairs) / len(pairs) for f in range(half)]
    return mean, [sum(abs(row[f]) for row in pairs) / len(pairs) for f in range(half)]


def tri_scores(statistics, k, now, positions, frequencies, factors, sinks=4, normalise=True):
    """Scores `[n]` of one kv head's keys.

    Args:
        statistics: of each query head of the group, as `query_statistics` returns them.
        k: [n, D], after RoPE.
        now: tokens of the text.
        positions: [n] of the keys.
        frequencies: [D/2] radians per position.
        factors: [D/2] on cosine and sine.
        sinks: first keys, whose scores are meaningless.
        normalise: to mean 0 and deviation 1 in each query head.
    """
    heads = []
    for mean, norm in statistics:
        scores = []
        for key, position in zip(np.asarray(k, np.float64), positions, strict=True):
            pairs = undo_rope(key, position, frequencies, factors)
            score = 0.0
            for f, pair in enumerate(pairs):
                amplitude = abs(mean[f]) * abs(pair)
                angle = cmath.phase(mean[f] * pair.conjugate())
                for exponent in range(17):
                    distance = now - position + 2**exponent
                    phase = math.fmod(distance * frequencies[f], 2 * math.pi) + angle
                    score += factors[f] ** 2 * amplitude * math.cos(phase) / 17
                score += factors[f] ** 2 * (norm[f] - abs(mean[f])) * abs(pair)
            scores.append(score)
        if normalise and len(scores) > sinks:
            others = scores[sinks:]
            middle = math.fsum(others) / len(others)
            spread = math.sqrt(math.fsum((x - middle) ** 2 for x in others) / len(others))
            scores = [(x - middle) / max(spread, 1e-6) for x in scores]
        heads.append(scores)
    return np.max(heads, axis=0)
