"""Factual and functional answer tokens: what temperature does to them, and what the run did."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from asu_interp.heads import HeadSet
from asu_interp.lens.response import FACTUAL_LOST, FUNCTIONAL_LOST
from asu_interp.report.figures import style
from asu_interp.report.figures.recall import Facts, fact_pairs
from asu_interp.report.figures.style import Result, data, finish, panels, percent, safe, signed

PROMPT, LINE, CELL = 22, 32, 25  # pixels: a prompt, a line of tokens, the height of a token
WIDEST = 105  # characters in a line of tokens


def response_curves(response: Result) -> go.Figure:
    """NLL (nats) and share of lost tokens by class over tau, with 95 % intervals (TemperatureResponse)."""
    found = data(response)
    figure = panels(["", ""], horizontal_spacing=0.1)
    add_class_curves(figure, found, "nll", column=1)
    add_class_curves(figure, found, "lost", column=2, scale=100)
    figure.update_xaxes(title="temperature τ (1: untouched)")
    figure.update_yaxes(title="NLL, nats per token", rangemode="tozero", col=1)
    figure.update_yaxes(title="tokens lost to greedy decoding, %", range=[-3, 103], col=2)
    title = f"What blurring {blurred_heads(found)} does to factual and functional tokens"
    subtitle = f"{interval_sentence(found)} {found['n_factual']} factual and {found['n_functional']} functional tokens."
    return finish(figure, title, subtitle, 300, titled=0)


def token_strip(before: Result, after: Result, set_name: str = "forget", n: int = 12) -> go.Figure:
    """Answer tokens of the first n facts as cells, coloured by their change of NLL in nats; factual ones underlined."""
    facts = fact_pairs(before, after, set_name)
    cells, prompts, height = _lay_out(facts[:n])
    reach = max((abs(cell["change"]) for cell in cells), default=0.0) or 1.0
    figure = panels([""])
    _add_cells(figure, cells, reach)
    _add_underlines(figure, cells)
    at, text = zip(*prompts, strict=True)
    asked = go.Scatter(x=[0] * len(at), y=at, text=[safe(t) for t in text], mode="text", textposition="middle right")
    figure.add_trace(asked.update(textfont={"color": style.PALE}, hoverinfo="skip", showlegend=False))
    widest = max(cell["start"] + cell["width"] for cell in cells)
    figure.update_xaxes(range=[0, max(widest, 50)], visible=False).update_yaxes(range=[height, 0], visible=False)
    shown = f"{min(n, len(facts))} of {len(facts)} facts of the {set_name} set shown"
    subtitle = f"{_changes(facts)} {shown}."
    return finish(figure, "Which words became harder to say", subtitle, height, titled=0, left=16, bottom=8)


def add_class_curves(
    figure: go.Figure, found: dict[str, Any], quantity: str, *, column: int = 1, scale: float = 1
) -> None:
    """One line with its band per token class, and the interval of tau that meets the claim."""
    for name, color in style.CLASSES.items():
        points = [(t, m) for t, m in zip(found["taus"], found["by_class"][name][quantity], strict=True) if m["n"]]
        taus = [tau for tau, _ in points]
        low, mean, high = ([scale * m[end] for _, m in points] for end in ("low", "mean", "high"))
        look = {"legendgroup": name, "x": taus, "line": {"color": color, "width": 2.5, "dash": style.DASHES[name]}}
        band = go.Scatter(x=[*taus, *taus[::-1]], y=[*high, *low[::-1]], fill="toself", fillcolor=color, opacity=0.18)
        band.update(mode="none", hoverinfo="skip", legendgroup=name, showlegend=False, name=f"{name} interval")
        symbol = "circle" if name == "factual" else "square-open"
        hover = f"{name}, τ = %{{x}}: %{{y:.3g}} [%{{customdata[0]:.3g}}, %{{customdata[1]:.3g}}]<extra></extra>"
        line = go.Scatter(
            look, y=mean, mode="lines+markers", marker={"symbol": symbol, "size": 8}, name=f"{name} tokens"
        )
        line.update(
            customdata=list(zip(low, high, strict=True)),
            hovertemplate=hover,
            showlegend=not style.drawn(figure, line.name),
        )
        figure.add_traces([band, line], rows=1, cols=column)
    if found["interval"]:
        low, high = found["interval"]
        figure.add_vrect(
            low, high, fillcolor="#f2d46b", opacity=0.28, layer="below", row=1, col=column, line_color="#c9a227"
        )
    if quantity == "lost":
        for limit in (FACTUAL_LOST, FUNCTIONAL_LOST):
            figure.add_hline(scale * limit, line={"color": style.PALE, "width": 1, "dash": "dot"}, row=1, col=column)


def interval_sentence(found: dict[str, Any]) -> str:
    """At which temperatures of the grid facts are lost and the rest is spared, if at any."""
    claim = f"at least {percent(FACTUAL_LOST)} of factual and at most {percent(FUNCTIONAL_LOST)} of functional tokens"
    if not found["interval"]:
        return f"At no τ of the grid ({min(found['taus']):g} to {max(found['taus']):g}) are {claim} lost."
    low, high = found["interval"]
    where = f"At τ = {low:g} only" if low == high else f"At τ = {low:g} and τ = {high:g}, but none below or above"
    return f"{where} (shaded), {claim} are lost."


def blurred_heads(found: dict[str, Any]) -> str:
    shape = HeadSet(frozenset(), len(found["entropy"][0]), len(found["entropy"][0][0]))
    chosen = HeadSet.parse(found["heads"], shape)
    return "all heads" if len(chosen) == len(~shape) else f"{len(chosen)} of {len(~shape)} heads"


def _changes(facts: Facts) -> str:
    """Mean NLL change of both classes over the whole set."""
    changes: dict[str, list[float]] = {"factual": [], "functional": []}
    for old, new in facts:
        for factual, a, b in zip(old["factual"], old["nll"], new["nll"], strict=True):
            changes["factual" if factual else "functional"].append(b - a)
    means = [f"{signed(sum(c) / len(c))} nats for {name} tokens" for name, c in changes.items() if c]
    return f"Mean change of NLL over the whole set: {style.join(means)}."


def _lay_out(facts: Facts) -> tuple[list[dict[str, Any]], list[tuple[float, str]], int]:
    """Cells and prompts with their places, x in characters and y in pixels from the top, and the total height."""
    cells, prompts, top = [], [], 0
    for old, new in facts:
        prompts.append((top + PROMPT / 2, textwrap.shorten(old["prompt"], WIDEST, placeholder=" …")))
        top, start = top + PROMPT, 0.0
        for token, factual, a, b in zip(old["tokens"], old["factual"], old["nll"], new["nll"], strict=True):
            width = len(_shown(token)) + 1.6
            if start + width > WIDEST:
                top, start = top + LINE, 0.0
            place = {"start": start, "width": width, "y": top + CELL / 2}
            cells.append({"token": token, "factual": factual, "before": a, "after": b, "change": b - a, **place})
            start += width
        top += LINE + 6
    return cells, prompts, top


def _add_cells(figure: go.Figure, cells: Sequence[dict[str, Any]], reach: float) -> None:
    change, y = [cell["change"] for cell in cells], [cell["y"] for cell in cells]
    start, width = [cell["start"] for cell in cells], [cell["width"] for cell in cells]
    hover = [
        f"<b>{safe(cell['token'])}</b> ({'factual' if cell['factual'] else 'functional'})"
        f"<br>NLL {cell['before']:.2f} → {cell['after']:.2f} ({signed(cell['change'])} nats)"
        for cell in cells
    ]
    colors = sample_colorscale(style.DIVERGING, [(value / reach + 1) / 2 for value in change])
    marker = {"color": colors, "line": {"color": style.GRID, "width": 1}}
    boxes = go.Bar(orientation="h", base=start, x=width, y=y, width=CELL, marker=marker, customdata=change)
    figure.add_trace(boxes.update(hovertext=hover, hoverinfo="text", showlegend=False))
    # bars coloured by number make Plotly complain, so the scale belongs to a trace that shows nothing else
    bar = {"thickness": 12, "outlinewidth": 0, "lenmode": "pixels", "len": 200, "x": 1.01, "y": 1, "yanchor": "top"}
    bar |= {"title": {"text": "NLL change,<br>nats", "font": {"size": 12}}, "tickfont": {"size": 12}}
    scale = {"color": [0], "cmin": -reach, "cmax": reach, "colorscale": style.DIVERGING, "colorbar": bar}
    figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=scale, showlegend=False))
    font = {"family": style.MONO, "size": 12, "color": [_ink(value / reach) for value in change]}
    middle = [left + wide / 2 for left, wide in zip(start, width, strict=True)]
    words = go.Scatter(x=middle, y=y, text=[safe(_shown(cell["token"])) for cell in cells], mode="text", textfont=font)
    figure.add_trace(words.update(hoverinfo="skip", showlegend=False))


def _shown(token: str) -> str:
    """Without the space before a word; a token of white space alone stays."""
    return token.strip(" ") or token


def _ink(share: float) -> str:
    return "white" if share > 0.5 else style.INK


def _add_underlines(figure: go.Figure, cells: Sequence[dict[str, Any]]) -> None:
    factual = [cell for cell in cells if cell["factual"]]
    x = [at for cell in factual for at in (cell["start"] + 0.2, cell["start"] + cell["width"] - 0.2, None)]
    y = [at for cell in factual for at in (*2 * [cell["y"] + CELL / 2 + 2], None)]
    line = {"color": style.CLASSES["factual"], "width": 3}
    figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line=line, name="factual token", hoverinfo="skip"))
