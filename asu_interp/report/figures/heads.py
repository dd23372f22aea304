"""Maps of all heads: which carry the facts, how far they look back, what blurring one of them alone does."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from asu_interp.errors import RunError
from asu_interp.heads import HeadSet
from asu_interp.report.figures.maps import (
    Cell,
    add_frames,
    add_map,
    cell_height,
    cell_title,
    every,
    head_set,
    map_height,
)
from asu_interp.report.figures.style import (
    DIVERGING_FINE,
    Result,
    data,
    finish,
    join,
    panels,
    percent,
    signed,
    total_height,
)

CLASS_NAMES = ("local", "mid", "global")
CLASS_SHADES = ("#e3efe9", "#86bfae", "#1f6b5c")
CLASS_SCALE = [[(i + end) / 3, shade] for i, shade in enumerate(CLASS_SHADES) for end in (0, 1)]


def head_map(
    heads: Result | None = None, located: Result | None = None, chosen: HeadSet | Result | None = None
) -> go.Figure:
    """Patching score and distance class of every head (HeadScores, HeadClasses), the chosen and the sinks marked."""
    classes, scores = (data(result) if result is not None else None for result in (heads, located))
    table = scores["scores"] if scores else classes["distance"] if classes else None
    if table is None:
        raise RunError("head_map: give the classes of the heads, their patching scores, or both")
    picked, kinds = head_set(chosen), _kinds(classes)
    hover = _everything(scores, classes, kinds, picked)
    titles = [*([score_title(scores)] if scores else []), *([_class_title(classes)] if classes else [])]
    figure = panels(titles, rows=len(titles), height=map_height(table))
    if scores:
        add_map(figure, table, hover, unit="score", colorscale=DIVERGING_FINE)
    if classes:
        _add_classes(figure, kinds, hover, row=len(titles))
    for row in range(1, len(titles) + 1):
        add_frames(figure, picked, row=row, width=cell_height(table) / 11)
    figure.update_xaxes(title="layer").update_yaxes(title="head")
    subtitle = " ".join([*_score_sentences(scores), *_class_sentences(kinds, picked)])
    height = total_height(len(titles), map_height(table))
    return finish(figure, "Which heads carry the facts, and how far they look back", subtitle, height)


def selectivity_map(selectivity: Result, chosen: HeadSet | Result | None = None) -> go.Figure:
    """Factual minus functional NLL rise (nats) with one head alone blurred, for every head (HeadSelectivity)."""
    found, picked = data(selectivity), head_set(chosen)
    names = ("selectivity", "nll_change_factual", "nll_change_functional")
    table, factual, functional = (found[name] for name in names)

    def hover(layer: int, head: int) -> str:
        return (
            f"{cell_title(picked, layer, head)}<br>selectivity {signed(table[layer][head])} nats"
            f"<br>factual NLL {signed(factual[layer][head])}, functional {signed(functional[layer][head])}"
        )

    figure = panels(["rise of factual minus rise of functional NLL, nats per token"])
    add_map(figure, table, hover, unit="nats")
    add_frames(figure, picked, width=cell_height(table) / 11)
    figure.update_xaxes(title="layer").update_yaxes(title="head")
    above = sum(table[i][j] > 0 for i, j in every(table))
    subtitle = (
        f"One head alone blurred, at τ = {found['tau']:g}; dark: factual tokens suffer more than functional ones. "
        f"{selectivity_sentence(found)}. Above zero are {above} of {len(every(table))} heads "
        f"({found['n_factual']} factual and {found['n_functional']} functional tokens)."
    )
    return finish(figure, "Which single heads are selective", subtitle, map_height(table), legend=bool(picked))


def score_title(scores: dict[str, Any]) -> str:
    verb = "restores" if scores["direction"] == "denoising" else "destroys"
    return f"patching score: share of the logit difference that the head alone {verb}"


def score_sentence(scores: dict[str, Any]) -> str:
    """How few heads hold most of the patching score."""
    values = [value for line in scores["scores"] for value in line]
    positive = sorted((value for value in values if value > 0), reverse=True)
    held, count = 0.0, 0
    while count < len(positive) and held < 0.8 * sum(positive):
        held += positive[count]
        count += 1
    return f"{count} of {len(values)} heads hold {percent(0.8)} of the positive patching score"


def selectivity_sentence(found: dict[str, Any]) -> str:
    """The head that hits facts most and spares the rest."""
    table = found["selectivity"]
    layer, head = max(every(table), key=lambda pair: table[pair[0]][pair[1]])
    factual, functional = (signed(found[f"nll_change_{name}"][layer][head]) for name in ("factual", "functional"))
    return f"Most selective is {layer}.{head}: factual NLL {factual}, functional {functional} nats"


def _score_sentences(scores: dict[str, Any] | None) -> list[str]:
    if scores is None:
        return []
    sure = sum(low > 0 for line in scores["low"] for low in line)
    pairs = f"{scores['n_pairs']} pair{'s' * (scores['n_pairs'] != 1)} of prompts"
    return [f"{score_sentence(scores)} ({pairs}); the {percent(0.95)} interval of {sure} lies above zero."]


def _class_sentences(kinds: dict[str, HeadSet], picked: HeadSet | None) -> list[str]:
    if not (kinds and picked):
        return []
    shares = join([f"{len(picked & kinds[name])} {name}" for name in CLASS_NAMES])
    return [f"Chosen heads: {shares}; sinks among them: {len(picked & kinds['sinks'])}."]


def _class_title(classes: dict[str, Any]) -> str:
    rho, sinks = percent(classes["rho"]), " (first token left out)" * classes["exclude_sinks"]
    return f"distance looked back{sinks}: the nearest {rho} of heads are local, the farthest {rho} global"


def _kinds(classes: dict[str, Any] | None) -> dict[str, HeadSet]:
    if classes is None:
        return {}
    shape = HeadSet(frozenset(), len(classes["distance"]), len(classes["distance"][0]))
    return {name: HeadSet.parse(classes[name], shape) for name in (*CLASS_NAMES, "sinks")}


def _everything(
    scores: dict[str, Any] | None, classes: dict[str, Any] | None, kinds: dict[str, HeadSet], picked: HeadSet | None
) -> Cell:
    def hover(layer: int, head: int) -> str:
        lines = [cell_title(picked, layer, head)]
        if scores:
            value, low, high = (scores[name][layer][head] for name in ("scores", "low", "high"))
            lines.append(f"patching score {value:.3f} [{low:.3f}, {high:.3f}]")
        if classes:
            d, without, share = (
                classes[name][layer][head] for name in ("distance", "distance_without_sink", "sink_share")
            )
            kind = next(name for name in CLASS_NAMES if (layer, head) in kinds[name])
            lines.append(f"class {kind}: d = {d:.1f} tokens ({without:.1f} without the first token)")
            lines.append(f"sink share {percent(share)}{' (sink)' * ((layer, head) in kinds['sinks'])}")
        return "<br>".join(lines)

    return hover


def _add_classes(figure: go.Figure, kinds: dict[str, HeadSet], hover: Cell, row: int) -> None:
    table = (kinds["mid"].mask + 2 * kinds["global"].mask).tolist()
    add_map(figure, table, hover, row=row, limits=(-0.5, 2.5), unit="class", colorscale=CLASS_SCALE, text=None)
    figure.data[-1].colorbar.update(tickvals=[0, 1, 2], ticktext=CLASS_NAMES)
    sinks = list(kinds["sinks"])
    size = cell_height(table) / 3
    marker = {"symbol": "circle", "size": size, "color": "white", "line": {"color": "black", "width": size / 5}}
    dots = go.Scatter(x=[i for i, _ in sinks], y=[j for _, j in sinks], mode="markers", marker=marker)
    name = f"sink ({len(sinks)}): mostly attends to the first token"
    figure.add_trace(dots.update(name=name, hoverinfo="skip", showlegend=bool(sinks)), row=row, col=1)
