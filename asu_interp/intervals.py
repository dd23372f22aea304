"""Means with bootstrap confidence intervals; what is resampled is the fact, because its tokens depend on each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Mean:
    """A mean, its 95 % percentile-bootstrap interval, and the number of values; NaN where there are none."""

    mean: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int | None]:
        return {key: None if value != value else value for key, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap_mean(
    values: ArrayLike, groups: ArrayLike | None = None, *, seed: int = 0, n_resamples: int = 1000
) -> Mean:
    """Mean over all values; whole groups (None: each value its own) are drawn with replacement."""
    numbers = np.asarray(values, dtype=float)
    if numbers.size == 0:
        return Mean(float("nan"), float("nan"), float("nan"), 0)
    names = np.arange(numbers.size) if groups is None else np.asarray(groups)
    _, member = np.unique(names, return_inverse=True)
    sums, counts = np.bincount(member, weights=numbers), np.bincount(member)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(n_resamples, len(sums)))
    resampled = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Mean(float(numbers.mean()), float(low), float(high), int(numbers.size))
