"""Unlearning methods by name: one short file each, whose loss reads like the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asu_interp.errors import RunError
from asu_interp.unlearning.objectives.asu import asu_gd, asu_kl
from asu_interp.unlearning.objectives.step import Losses, Scored, Step

__all__ = ["METHODS", "Losses", "Method", "Scored", "Step", "find_method"]


@dataclass(frozen=True)
class Method:
    """A loss and what to say about it."""

    name: str
    loss: Callable[[Step], Losses]
    formula: str
    source: str


METHODS = {
    method.name: method
    for method in (
        Method("asu-kl", asu_kl, "lambda KL(teacher || theta) on D_f + KL(theta_0 || theta) on D_r", "2603.01285"),
        Method("asu-gd", asu_gd, "lambda KL(teacher || theta) on D_f + CE on D_r", "2603.01285"),
    )
}


def find_method(name: str) -> Method:
    """The method of that name. Raises RunError."""
    if name not in METHODS:
        raise RunError(f'method "{name}": allowed are {", ".join(METHODS)}')
    return METHODS[name]
