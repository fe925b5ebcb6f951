"""What the experiments on syncs claim of partial reduce, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait_bench.harness import BenchClaim, Row

GOAL = 0.88


def partial_reduce_claims(rows: Sequence[Row], words: Callable[[Row], str]) -> list[BenchClaim]:
    """Partial reduce keeps its share of the ideal in every row of it, which `words` describes."""
    claims = []
    for row in rows:
        if row["sync"] == "partial-reduce":
            value = float(row["fraction_of_ideal"] or 0)
            claims.append(BenchClaim(words(row), value, f"at least {GOAL:g}", value >= GOAL))
    return claims
