"""The one way to say that a name is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from asu_interp.errors import FactsError


def unknown(what: str, name: str, allowed: Iterable[str]) -> FactsError:
    """The error that says what is allowed, near matches first."""
    by_lower = {each.lower(): each for each in allowed}
    near = [by_lower[match] for match in get_close_matches(name.lower(), by_lower)]
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return FactsError(f'{what} "{name}": unknown{hint}; allowed: {", ".join(by_lower.values())}')
