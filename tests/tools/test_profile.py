"""The shape and arithmetic of a profile; times themselves are whatever they are."""

from __future__ import annotations

import pytest

from paceline.core import Rows
from paceline.errors import RequestError
from paceline.tools.profile import OperationCost, profile
from support.stub_target import RandomRule, StubTarget


def test_every_kind_of_pass_is_timed_against_the_bandwidth_of_the_same_run() -> None:
    readings = iter([5e9, 8e9, *[6e9] * 1000])
    target = StubTarget(RandomRule(32), context_limit=1024, max_rows=600)
    found = profile(
        target,
        weight_bytes=1_000_000,
        kv_bytes_per_token=100,
        read_bandwidth=lambda: next(readings),
        context=20,
        budget_s=0.01,
    )
    assert [(p.rows, p.outputs) for p in found.passes] == [
        (1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (512, 1),
    ]  # fmt: skip
    assert found.read_bandwidth == 8e9
    assert found.passes[0].ratio == 1.0
    for cost in found.passes:
        assert cost.bytes == 1_002_000
        assert cost.fastest <= cost.seconds
        assert cost.ratio == pytest.approx(cost.seconds / found.passes[0].seconds)
        assert cost.bandwidth_share == pytest.approx(1_002_000 / cost.seconds / 8e9)
    counted = sum(cost.passes for cost in found.passes)
    assert len(target.row_counts) == 1 + len(found.passes) + counted  # context, warm-up, timed


def test_passes_the_target_cannot_take_are_left_out() -> None:
    target = StubTarget(RandomRule(32), max_rows=8)
    found = profile(
        target, weight_bytes=1, kv_bytes_per_token=1, read_bandwidth=lambda: 1.0, context=16, budget_s=0.0
    )
    assert [(p.rows, p.outputs) for p in found.passes] == [(1, 1), (2, 2), (4, 4), (8, 8), (8, 1)]


def test_operations_are_told_apart_in_passes_of_their_own() -> None:
    target = StubTarget(RandomRule(32), context_limit=1024, max_rows=600)
    asked: list[tuple[int, int]] = []

    def op_times(rows: Rows) -> dict[str, float]:
        asked.append((len(rows.tokens), len(rows.wanted)))
        return {"norm": 1.0 + len(asked) % 2, "linear": 3.0 * len(rows.tokens)}

    found = profile(
        target,
        weight_bytes=1,
        kv_bytes_per_token=1,
        read_bandwidth=lambda: 1.0,
        context=16,
        budget_s=0.0,
        op_times=op_times,
    )
    assert asked == [(1, 1), (8, 8), (512, 1)]
    assert found.operations == [
        OperationCost("linear", {1: 3.0, 8: 24.0, 512: 1536.0}),
        OperationCost("norm", {1: 2.0, 8: 1.0, 512: 2.0}),
    ]


def test_a_context_that_does_not_fit_is_refused() -> None:
    target = StubTarget(RandomRule(32), context_limit=64)
    with pytest.raises(RequestError, match="464 tokens do not fit the context limit 64"):
        profile(target, weight_bytes=1, kv_bytes_per_token=1, read_bandwidth=lambda: 1.0, context=400)
