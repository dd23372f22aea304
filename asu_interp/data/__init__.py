"""Facts: what a model is to forget and to keep, where they come from, and how they become batches."""

from asu_interp.data.builtin import neutral_texts
from asu_interp.data.facts import Fact, FactSet
from asu_interp.data.sources import load_facts
from asu_interp.data.tofu import tofu_rows

__all__ = ["Fact", "FactSet", "load_facts", "neutral_texts", "tofu_rows"]
