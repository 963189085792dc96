"""DefensiveKV's first stage: the rows that it takes, against the oracle."""

import numpy as np
import oracles as o
import pytest
from test_oracle_agreement import _Drawn, draw_layers

from jaxkv import CustomPolicy, DefensiveKV
from jaxkv.policies import WorstAttention


@pytest.mark.parametrize("stage", ("mass", "published"))
def test_the_first_stage_takes_the_oracles_rows(stage):
    scorer, sure, counts = WorstAttention(window=8, stage=stage), 0, set()
    for seed in range(6):
        lengths = (48, 20 + seed) if seed else (48, 5)
        q, k = draw_layers(seed, 3, lengths)
        q = q * (1 + 3 * (seed % 3))  # from even to peaked attention
        drawn = _Drawn(CustomPolicy(budget=9, scorer=scorer), q, k, np.asarray(lengths))
        ranks = np.asarray(drawn.get_layer_candidates(1).first)
        for row, n in enumerate(lengths):
            of = (
                each[1, row].reshape(-1, *each.shape[-2:])[:, :n].astype(np.float64)
                for each in (q, k)
            )
            expected, gap = o.defensive_first(*of, 8, stage)
            found = [
                [j for _, j in sorted((r, j) for j, r in enumerate(head) if r < 48)]
                for head in ranks[row]
            ]
            if gap > 1e-5:
                assert found == expected
                sure, counts = sure + 1, counts | {len(head) for head in expected}
    assert sure > 6 and len(counts) > 3


def test_a_first_stage_changes_nothing_unless_asked():
    assert DefensiveKV(stage="none") == DefensiveKV() != DefensiveKV(stage="mass")
