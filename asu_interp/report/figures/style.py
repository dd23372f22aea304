"""What all figures share: colours that differ in lightness, text that is safe to show, panels with their titles."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol

import plotly.graph_objects as go
from plotly.subplots import make_subplots

SETS = {"forget": "#9c2340", "neighbours": "#e5a443", "retain": "#4b86b4"}  # dark, light, middle
CLASSES = {"factual": "#43206e", "functional": "#35a08f"}
DASHES = {"factual": "solid", "functional": "dash"}
INK, PALE, GRID = "#1c1c1e", "#5f6368", "#e4e6e9"
LEFT, BOTTOM, GAP = 60, 48, 76  # pixels beside and below the panels, and between two rows of them
FONT = "'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# 0 is white. Dark is positive only, so that the sign survives in grey; maps mark the negative besides.
DIVERGING = [[0, "#e08a2e"], [0.25, "#f3c68f"], [0.5, "#ffffff"], [0.75, "#7a86c2"], [1, "#1d1147"]]
# For long-tailed values: half of the shades lie within an eighth of the scale.
DIVERGING_FINE = [
    [0, "#e08a2e"],
    [0.4375, "#f3c68f"],
    [0.5, "#ffffff"],
    [0.5625, "#a3acd6"],
    [0.7, "#5f6bb0"],
    [1, "#1d1147"],
]
SEQUENTIAL = [[0, "#fbf8e3"], [0.35, "#9fd3b6"], [0.7, "#3583a3"], [1, "#1b2a5e"]]

_AXIS = {
    "showline": True, "linecolor": "#9aa0a6", "ticks": "outside", "ticklen": 4, "tickcolor": "#9aa0a6",
    "gridcolor": GRID, "zeroline": False, "title": {"font": {"size": 13}, "standoff": 8}, "tickfont": {"size": 12},
}  # fmt: skip
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "hoverlabel": {"bgcolor": "white", "bordercolor": "#9aa0a6", "align": "left", "font": {"size": 13}},
        "legend": {"orientation": "h", "font": {"size": 12}},
    }
)


class HasDict(Protocol):
    """A result of the lens, the trainer or the evaluation."""

    def to_dict(self) -> dict[str, Any]: ...


Result = HasDict | dict[str, Any]


def data(result: Result) -> dict[str, Any]:
    """The result as its file has it, so that figures from objects and from JSON are the same."""
    return result if isinstance(result, dict) else result.to_dict()


def safe(text: str) -> str:
    """Any text as Plotly is to show it: no markup, no formula, white space visible where it is all there is."""
    shown = text.replace("\n", "↵") if text.strip(" ") else text.replace(" ", "␣")
    return html.escape(shown, quote=False).replace("$", "&#36;")


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}\u00a0%"


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def span(mean: dict[str, Any], scale: float = 1) -> str:
    """[low, high] of a Mean's dict."""
    return "–" if mean["mean"] is None else f"[{scale * mean['low']:.3g}, {scale * mean['high']:.3g}]"


def bars(means: Sequence[dict[str, Any]], scale: float = 1) -> dict[str, Any]:
    """Plotly's asymmetric error bars from low and high."""
    up, down = (
        [scale * sign * (m[end] - m["mean"]) if m["mean"] is not None else None for m in means]
        for end, sign in (("high", 1), ("low", -1))
    )
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "thickness": 1.4,
        "width": 4,
        "color": INK,
    }


def panels(titles: Sequence[str], *, rows: int = 1, height: int = 1, **options: Any) -> go.Figure:
    """Subplots, row by row, each with its title above its left edge; `height`: of one row, in pixels."""
    figure = make_subplots(
        rows=rows,
        cols=-(-len(titles) // rows),
        subplot_titles=titles,
        vertical_spacing=GAP / total_height(rows, height) if rows > 1 else None,
        **options,
    )
    # all panels have titles, or none has
    for annotation, cell in zip(figure.layout.annotations, figure.select_xaxes(), strict=False):
        annotation.update(x=cell.domain[0], xanchor="left", align="left", yshift=4, font={"size": 13, "color": INK})
    return figure


def total_height(rows: int, height: int) -> int:
    return rows * height + (rows - 1) * GAP


def finish(
    figure: go.Figure,
    title: str,
    subtitle: str,
    height: int,
    *,
    legend: bool = True,
    titled: int = 1,
    left: int = LEFT,
    bottom: int = BOTTOM,
) -> go.Figure:
    """Title, the sentence that says what to see, legend, panel titles of `titled` lines, panels of `height` pixels."""
    lines = textwrap.wrap(subtitle, 140, break_long_words=False)
    head = 34 + 18 * len(lines)
    top = 14 + 28 * legend + 20 * titled
    figure.update_layout(
        template=TEMPLATE,
        height=head + top + height + bottom,
        margin={"l": left, "r": 20, "t": head + top, "b": bottom},
        title={
            "text": f"<b>{title}</b>", "font": {"size": 17}, "pad": {"l": 16, "t": 14},
            "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
        },
        showlegend=legend,
        legend={"x": 0, "xanchor": "left", "y": 1 + (8 + 22 * titled) / height, "yanchor": "bottom"},
        meta={"title": title, "subtitle": subtitle, "head": head},
    )  # fmt: skip
    # not layout.title.subtitle: its place depends on how many lines it has
    return figure.add_annotation(
        name="subtitle", text="<br>".join(lines), font={"size": 13, "color": PALE}, align="left", showarrow=False,
        xref="paper", x=0, xanchor="left", xshift=14 - left, yref="paper", y=1, yanchor="top", yshift=head + top - 37,
    )  # fmt: skip


def take_title(figure: go.Figure) -> tuple[str, str, go.Figure]:
    """Title, subtitle and the figure without them, for pages that set them as text that wraps."""
    meta, bare = figure.layout.meta, go.Figure(figure)
    head = meta["head"]
    bare.layout.annotations = [each for each in bare.layout.annotations if each.name != "subtitle"]
    bare.update_layout(title=None, height=figure.layout.height - head, margin_t=figure.layout.margin.t - head)
    return html.unescape(meta["title"]), html.unescape(meta["subtitle"]), bare


def drawn(figure: go.Figure, name: str) -> bool:
    """Whether a trace of this name is there, so that the legend has it once."""
    return any(trace.name == name for trace in figure.data)


def join(parts: Sequence[str]) -> str:
    """a, b and c"""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
