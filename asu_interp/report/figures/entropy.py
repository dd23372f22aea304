"""How spread out attention is, before and after, and what changed."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from asu_interp.heads import HeadSet
from asu_interp.report.figures.maps import (
    Cell,
    Table,
    add_frames,
    add_map,
    cell_title,
    every,
    head_set,
    map_height,
    step,
    symmetric,
)
from asu_interp.report.figures.style import Result, data, finish, join, panels, signed, total_height

LOOKS = (("#8a8f98", "dot"), ("#3583a3", "dash"), ("#1b2a5e", "solid"), ("#b0682a", "dashdot"))


def entropy_maps(evaluations: Mapping[str, Result], chosen: HeadSet | Result | None = None) -> go.Figure:
    """Attention entropy of every head in nats, state by state on one scale, and below it the change from the first."""
    tables: dict[str, Table] = {name: data(result)["attention_entropy"] for name, result in evaluations.items()}
    picked = head_set(chosen)
    first, base = next(iter(tables.items()))
    changes = {f"{name} − {first}": _minus(table, base) for name, table in tables.items() if name != first}
    titles = [*tables, *(["mean of each layer", *changes] if changes else [])]
    rows, height = 1 + bool(changes), map_height(base, 300)
    figure = panels(titles, rows=rows, height=height, horizontal_spacing=0.05)
    _add_maps(figure, tables, limits=(0, max(max(map(max, table)) for table in tables.values())), row=1)
    if changes:
        _add_maps(figure, changes, limits=symmetric(*changes.values()), row=2)
        for column in range(2, len(tables) + 1):
            add_frames(figure, picked, row=2, column=column, width=1)
        _add_layer_means(figure, tables)
    figure.update_xaxes(title="layer", dtick=step(len(base), 7)).update_yaxes(title="head", row=1, col=1)
    means = join([f"{name} {_mean(table):.2f}" for name, table in tables.items()])
    subtitle = " ".join([f"Mean over all heads, nats: {means}.", *(_told(*each, picked) for each in changes.items())])
    return finish(figure, "How spread out attention is (entropy)", subtitle, total_height(rows, height))


def _add_maps(figure: go.Figure, tables: Mapping[str, Table], limits: tuple[float, float], row: int) -> None:
    """A row of maps that ends at the right, with one colour bar."""
    first = 1 if row == 1 else 2  # the second row begins with the curves
    for column, (name, table) in enumerate(tables.items(), start=first):
        unit = "nats" if column == first + len(tables) - 1 else None
        hover = _hover(name, table)
        add_map(figure, table, hover, row=row, column=column, limits=limits, unit=unit, xgap=0, ygap=0)


def _add_layer_means(figure: go.Figure, tables: Mapping[str, Table]) -> None:
    for (name, table), (color, dash) in zip(tables.items(), LOOKS, strict=False):
        means = [sum(heads) / len(heads) for heads in table]
        line = {"color": color, "dash": dash, "width": 2}
        figure.add_trace(go.Scatter(y=means, mode="lines", line=line, name=name), row=2, col=1)
    figure.update_yaxes(title="nats", rangemode="tozero", row=2, col=1)


def _hover(name: str, table: Table) -> Cell:
    return lambda layer, head: f"{cell_title(None, layer, head)}<br>{name}: {table[layer][head]:.2f} nats"


def _told(name: str, change: Table, picked: HeadSet | None) -> str:
    if not picked:
        return f"{name}: {signed(_mean(change))}."
    inside, outside = (sum(change[i][j] for i, j in heads) / len(heads) for heads in (picked, ~picked))
    return f"{name}: {signed(inside)} in the chosen heads, {signed(outside)} in the others."


def _minus(table: Table, base: Table) -> Table:
    return [[a - b for a, b in zip(*lines, strict=True)] for lines in zip(table, base, strict=True)]


def _mean(table: Table) -> float:
    return sum(map(sum, table)) / len(every(table))
