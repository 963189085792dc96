"""What is rejected, and how clearly: every row of the table, by its door."""

import pytest
import refusals_calls
import refusals_evals
import refusals_models
import refusals_parts
import refusals_plans
import refusals_policies

TABLE = [
    *refusals_policies.ROWS,
    *refusals_parts.ROWS,
    *refusals_models.ROWS,
    *refusals_calls.ROWS,
    *refusals_plans.ROWS,
    *refusals_evals.ROWS,
]


def name_of(row):
    return f"{row.door}: {row.told.replace(chr(92), '')}"[:72]


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_refused(row, as_users_call, tmp_path, monkeypatch):
    """By name, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(row.kind, match=row.told):
        row.call()
    assert not list(tmp_path.iterdir())
