"""Plans: worth looked up equals worth worked out, and what rounding may take from it is little."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bitmtp.decoding.costs import CostTable, sigmoid
from bitmtp.decoding.plans import Plans, plans_of, verify_gains

COSTS = CostTable((1, 2, 8, 16), (3.7, 4.4, 7.4, 13.2), per_position=(0.002, 0.0005))


@given(odds=st.floats(-2, 3), rate=st.floats(1, 3), history=st.integers(0, 5000))
def test_rounding_costs_little(odds: float, rate: float, history: int) -> None:
    price = rate / COSTS.cost(1, history)
    prices = [price * COSTS.cost(rows, history) for rows in range(1, 18)]
    gains = list(verify_gains(sigmoid(odds), prices))
    worths = [1 - prices[0], *(gains[size - 1] + 1 - prices[size - 1] for size in range(2, 17))]
    plan = Plans(COSTS, 16).at(odds, price, history, windowed=False)
    assert len(plan.worths) == 16
    assert max(worths) - worths[plan.best(16) - 1] < 0.2
    assert plan.best(3) <= 3
    assert plan.best(0) == 1


def test_texts_share_plans() -> None:
    plans = plans_of(COSTS, 16)
    assert plans_of(CostTable(COSTS.widths, COSTS.milliseconds, COSTS.history, COSTS.per_position), 16) is plans
    assert plans.at(1.0, 0.4, 100, windowed=False) is plans.at(1.01, 0.4, 101, windowed=False)


def test_a_windowed_draft_has_to_be_verified() -> None:
    """However hopeless it is, the anchor's row has to run: what it promises is less than to draft nothing."""
    plan = Plans(COSTS, 8).at(-4.0, 1 / COSTS.cost(1, 4000), 4000, windowed=True)
    assert plan.best(8) == 1
    assert max(plan.worths[1:]) < plan.worths[0]
