"""The whole story in one wide picture: which heads, what the model still says, what blurring does."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from asu_interp.heads import HeadSet
from asu_interp.report.figures.heads import score_sentence, selectivity_sentence
from asu_interp.report.figures.maps import add_frames, add_map, head_set, step
from asu_interp.report.figures.recall import add_recall, recall_sentence
from asu_interp.report.figures.style import DIVERGING, DIVERGING_FINE, Result, data, finish, panels
from asu_interp.report.figures.tokens import add_class_curves, blurred_heads

WIDTH, HEIGHT = 1180, 280


def hero(
    evaluations: Mapping[str, Result], scores: Result, chosen: HeadSet | Result | None, response: Result
) -> go.Figure:
    """The map of the heads, recall by set and state, and the tokens lost over temperature, side by side.

    `scores` are those that the heads were chosen by: HeadScores or HeadSelectivity.
    """
    states = {name: data(evaluation)["sets"] for name, evaluation in evaluations.items()}
    mapped, found, picked = data(scores), data(response), head_set(chosen)
    patched = "scores" in mapped
    table, unit = (mapped["scores"], "score") if patched else (mapped["selectivity"], "nats")
    titles = [
        f"<b>Which heads carry the facts</b><br>{(score_sentence if patched else selectivity_sentence)(mapped)}",
        "<b>What the model still recalls</b><br>facts, %; hatched: asked in other words",
        f"<b>What blurring does</b><br>tokens lost, {blurred_heads(found)} blurred",
    ]
    figure = panels(titles, column_widths=[0.36, 0.41, 0.23], horizontal_spacing=0.09)
    add_map(
        figure,
        table,
        lambda i, j: f"{i}.{j}: {table[i][j]:.3f}",
        unit=unit,
        colorscale=DIVERGING_FINE if patched else DIVERGING,
    )
    add_frames(figure, picked, width=1.3)
    add_recall(figure, states, kinds=("recall", "recall_paraphrased"), column=2)
    figure.update_yaxes(title=None, col=2)  # the panel's title says it
    add_class_curves(figure, found, "lost", column=3, scale=100)
    figure.update_xaxes(title="layer", dtick=step(len(table), 8), col=1).update_yaxes(title="head", col=1)
    figure.update_xaxes(title="temperature τ", col=3)
    figure.update_yaxes(title="tokens lost, %", range=[-3, 103], col=3)
    title = "Find the heads that carry the facts, blur them, and see what the model still says"
    return finish(figure, title, recall_sentence(states), HEIGHT, titled=2, bottom=64).update_layout(width=WIDTH)
