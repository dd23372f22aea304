"""The parts of a map of all heads: layers from left to right, heads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from asu_interp.heads import HeadSet
from asu_interp.report.figures import style
from asu_interp.report.figures.style import Result, data

Table = Sequence[Sequence[float]]  # [layer][head]
Cell = Callable[[int, int], str]  # layer, head -> what is said about it
MINUS_FROM = 0.1  # of the scale's end: from here a negative cell carries a minus sign
TALLEST = 640  # pixels


def head_set(chosen: HeadSet | Result | None) -> HeadSet | None:
    """The heads to mark; None where none or all are chosen, because then there is nothing to tell apart."""
    heads = chosen if chosen is None or isinstance(chosen, HeadSet) else HeadSet.from_dict(data(chosen))
    return heads if heads and ~heads else None


def add_map(
    figure: go.Figure,
    table: Table,
    hover: Cell,
    *,
    row: int = 1,
    column: int = 1,
    limits: tuple[float, float] | None = None,
    unit: str | None = None,
    **options: Any,
) -> None:
    """One map, white at 0 if `limits` (default: symmetric) span it; with `unit`, its colour bar."""
    low, high = limits or symmetric(table)
    heatmap = {
        "z": turn(table),
        "zmin": low,
        "zmax": high,
        "colorscale": style.DIVERGING if low < 0 else style.SEQUENTIAL,
        "hovertext": turn([[hover(i, j) for j in range(len(line))] for i, line in enumerate(table)]),
        "hoverinfo": "text",
        "text": turn([["−" if value < MINUS_FROM * low < 0 else "" for value in line] for line in table]),
        "texttemplate": "%{text}" if cell_height(table) >= 12 else None,
        "textfont": {"size": 12, "color": style.INK},
        "xgap": 1,
        "ygap": 1,
        "showscale": unit is not None,
        "colorbar": _colorbar(figure, row, column, unit),
    }
    figure.add_trace(go.Heatmap({**heatmap, **options}), row=row, col=column)
    area = {"x0": -0.5, "x1": len(table) - 0.5, "y0": -0.5, "y1": len(table[0]) - 0.5}
    figure.add_shape(area, fillcolor=style.GRID, line_width=0, layer="below", row=row, col=column)  # seen in the gaps
    figure.update_xaxes(range=[-0.6, len(table) - 0.4], dtick=step(len(table)), showgrid=False, row=row, col=column)
    heads = len(table[0])
    figure.update_yaxes(range=[heads - 0.4, -0.6], dtick=step(heads), showgrid=False, row=row, col=column)


def add_frames(figure: go.Figure, chosen: HeadSet | None, *, row: int = 1, column: int = 1, width: float = 2) -> None:
    """A frame in each chosen cell."""
    if not chosen:
        return
    edge = 0.43
    right, down = (-edge, edge, edge, -edge, -edge), (-edge, -edge, edge, edge, -edge)
    x = [at for layer, _ in chosen for at in (*(layer + step for step in right), None)]
    y = [at for _, head in chosen for at in (*(head + step for step in down), None)]
    for color, extra in (("white", 1.5), ("black", 0)):  # the white rim keeps the frame visible on dark cells
        line = {"color": color, "width": width + extra}
        frame = go.Scatter(x=x, y=y, mode="lines", line=line, hoverinfo="skip", showlegend=False)
        figure.add_trace(frame, row=row, col=column)
    marker = {"symbol": "square-open", "size": 11, "color": "black", "line": {"width": 2}}
    key = go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=f"chosen heads ({len(chosen)})")
    if not style.drawn(figure, key.name):
        figure.add_trace(key, row=row, col=column)


def cell_title(picked: HeadSet | None, layer: int, head: int) -> str:
    chosen = picked is not None and (layer, head) in picked
    return f"<b>layer {layer}, head {head}</b>{' (chosen)' * chosen}"


def map_height(table: Table, largest: int = TALLEST) -> int:
    return min(max(22 * len(table[0]), 130), largest)


def cell_height(table: Table) -> float:
    return min(map_height(table) / len(table[0]), 22)


def every(table: Table) -> list[tuple[int, int]]:
    return [(layer, head) for layer, line in enumerate(table) for head in range(len(line))]


def turn(table: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """[layer][head] to [head][layer]: the rows of the picture are heads."""
    return [list(line) for line in zip(*table, strict=True)]


def symmetric(*tables: Table) -> tuple[float, float]:
    reach = max((abs(value) for table in tables for line in table for value in line), default=0.0) or 1.0
    return -reach, reach


def _colorbar(figure: go.Figure, row: int, column: int, title: str | None) -> dict[str, Any]:
    cell = figure.get_subplot(row, column)
    low, high = cell.yaxis.domain
    return {
        "x": cell.xaxis.domain[1] + 0.01, "xanchor": "left", "y": (low + high) / 2, "len": high - low, "ypad": 0,
        "thickness": 12, "outlinewidth": 0, "tickfont": {"size": 12}, "title": {"text": title, "font": {"size": 12}},
    }  # fmt: skip


def step(count: int, most: int = 16) -> int:
    """A round distance between ticks that makes at most `most` of them."""
    return next(step for step in (1, 2, 5, 10, 20, 50) if count / step <= most)
