"""CAKE with options other than the policy table's: temperatures of entropy and variance, weight of the variance."""

import oracles as o
import pytest
import table_oracles as t
from policy_row import Row
from table_oracles import WINDOW
from test_oracle_agreement import check_agreement

from jaxkv import CAKE
from jaxkv.policies import PreferenceLayerBudgets


@pytest.mark.parametrize("group", (1, 3))
@pytest.mark.parametrize(("tau1", "tau2", "gamma"), ((1.6, 0.6, 200.0), (0.5, 2.0, 0.0)))
def test_kept_rows_are_the_oracles(group, tau1, tau2, gamma):
    options = {
        "layers": PreferenceLayerBudgets(tau1=tau1, tau2=tau2),
        "gamma": gamma,
        "window": WINDOW,
    }
    row = Row(
        name="cake",
        make=lambda budget, **kw: CAKE(budget=budget, **options, **kw),
        oracle=t.window(oracle=o.cake, tau1=tau1, tau2=tau2, gamma=gamma),
    )
    budgets = (12, 20, 0.6)
    assert any([check_agreement(row, at, group, (48, 30), each) for at, each in enumerate(budgets)])
