"""Figures: functions from results, or what their files hold, to Plotly figures."""

from asu_interp.report.figures.entropy import entropy_maps
from asu_interp.report.figures.heads import head_map, selectivity_map
from asu_interp.report.figures.hero import hero
from asu_interp.report.figures.recall import recall_bars, said_table
from asu_interp.report.figures.style import take_title
from asu_interp.report.figures.tokens import response_curves, token_strip
from asu_interp.report.figures.training import training_curves

__all__ = [
    "entropy_maps",
    "head_map",
    "hero",
    "recall_bars",
    "response_curves",
    "said_table",
    "selectivity_map",
    "take_title",
    "token_strip",
    "training_curves",
]
