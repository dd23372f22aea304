"""What the model still says: recall by set, and the answers themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from asu_interp.errors import RunError
from asu_interp.report.figures import style
from asu_interp.report.figures.style import Result, data, finish, join, panels, percent

BAR, NEXT, SET = 0.4, 0.45, 0.6  # widths: a bar, its distance to the paraphrased one, the room between sets
Facts = list[tuple[dict[str, Any], dict[str, Any]]]


def recall_bars(evaluations: Mapping[str, Result]) -> go.Figure:
    """Share of facts recalled by set and state, asked and paraphrased, with 95 % intervals (Evaluations by name)."""
    states = {name: data(evaluation)["sets"] for name, evaluation in evaluations.items()}
    figure = panels([""])
    add_recall(figure, states, kinds=("recall", "recall_paraphrased"))
    for name, hatched in (("prompts as asked", False), ("paraphrased prompts", True)):
        figure.add_trace(go.Bar(x=[None], y=[None], marker=_fill("#6b7076", hatched), name=name))
    return finish(figure, "What the model still recalls", recall_sentence(states), 300, titled=0, bottom=64)


def add_recall(
    figure: go.Figure, states: Mapping[str, dict[str, Any]], *, kinds: tuple[str, ...] = ("recall",), column: int = 1
) -> None:
    """Bars set by set, state by state; each state's name stands below its bar, the set's below them."""
    first = next(iter(states.values()))
    ticks, at = {}, 0.0
    for set_name, color in style.SETS.items():
        if set_name not in first:
            continue
        begin = at
        asked = [kind for kind in kinds if first[set_name][kind]["n"]]
        for state, sets in states.items():
            for i, kind in enumerate(asked):
                place = at + NEXT * (i + (len(kinds) - len(asked)) / 2)
                _add_bar(figure, f"{set_name}, {state}", sets[set_name][kind], color, place, bool(i), column)
            ticks[at + NEXT * (len(kinds) - 1) / 2] = state.replace("_", " ")
            at += NEXT * len(kinds) + 0.15
        middle = (begin + at - NEXT - 0.15) / 2
        figure.add_annotation(
            x=middle, y=0, yshift=-26, yanchor="top", showarrow=False, row=1, col=column,
            text=f"<b>{set_name}</b><br>{first[set_name]['n_facts']} facts",
        )  # fmt: skip
        at += SET
    figure.update_xaxes(tickvals=list(ticks), ticktext=list(ticks.values()), ticks="", showgrid=False, col=column)
    figure.update_yaxes(title="facts recalled, %", range=[0, 112], tickvals=[0, 25, 50, 75, 100], col=column)


def recall_sentence(states: Mapping[str, dict[str, Any]]) -> str:
    """Recall of every set as asked, first state to last."""
    (first, old), *others = states.items()
    if not others:
        return join([f"{name} {percent(scores['recall']['mean'])}" for name, scores in old.items()]) + "."
    last, new = next(((n, s) for n, s in others if n == "after"), others[-1])
    moves = [f"{name} {percent(old[name]['recall']['mean'])} → {percent(new[name]['recall']['mean'])}" for name in old]
    words = ""
    if "forget" in old and old["forget"]["recall_paraphrased"]["n"]:
        was, now = (percent(sets["forget"]["recall_paraphrased"]["mean"]) for sets in (old, new))
        words = f" In other words, forget {was} → {now}."
    return f"Prompts as asked, {first} → {last}: {join(moves)}.{words} Lines: {percent(0.95)} intervals over facts."


def said_table(before: Result, after: Result) -> list[dict[str, Any]]:
    """One row per fact: set, prompt, stem, target, what was said before and after, and whether that is the target."""
    return [
        {
            "set": set_name,
            **{key: old[key] for key in ("prompt", "stem", "target")},
            "before": old["said"],
            "after": new["said"],
            "recalled_before": old["recalled"],
            "recalled_after": new["recalled"],
        }
        for set_name in data(before)["sets"]
        for old, new in fact_pairs(before, after, set_name)
    ]


def fact_pairs(before: Result, after: Result, set_name: str) -> Facts:
    """The facts of a set as they were and are. Raises RunError if the two evaluations are not of the same facts."""
    old, new = (data(result)["sets"].get(set_name, {"facts": []})["facts"] for result in (before, after))
    if not old or [fact["prompt"] for fact in old] != [fact["prompt"] for fact in new]:
        raise RunError(f'the "{set_name}" set is empty, or not the same facts in the two evaluations')
    return list(zip(old, new, strict=True))


def _add_bar(
    figure: go.Figure, name: str, mean: dict[str, Any], color: str, x: float, hatched: bool, column: int
) -> None:
    value, top = 100 * mean["mean"], 100 * mean["high"]
    hover = (
        f"{name}{', paraphrased' * hatched}<br>{value:.1f} % {style.span(mean, 100)}, n = {mean['n']}<extra></extra>"
    )
    bar = go.Bar(x=[x], y=[value], width=BAR, marker=_fill(color, hatched), error_y=style.bars([mean], 100), name=name)
    figure.add_trace(bar.update(hovertemplate=hover, showlegend=False), row=1, col=column)
    label = go.Scatter(x=[x], y=[top], text=[f"{value:.0f}"], mode="text", textposition="top center")
    figure.add_trace(label.update(hoverinfo="skip", showlegend=False), row=1, col=column)


def _fill(color: str, hatched: bool) -> dict[str, Any]:
    pattern = {"shape": "/" if hatched else "", "fgcolor": color, "bgcolor": "white", "size": 6, "solidity": 0.35}
    return {"color": color, "pattern": pattern, "line": {"color": color, "width": 1}}
