"""How the training went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from asu_interp.report.figures import style
from asu_interp.report.figures.style import finish, panels

LOOKS = (("forget", "solid"), ("retain", "dash"))


def training_curves(log: Sequence[dict[str, Any]]) -> go.Figure:
    """Loss and NLL (nats per token) of the forget and the retain samples over the steps (a Run's log)."""
    figure = panels(["", ""], horizontal_spacing=0.1)
    steps = [entry["step"] for entry in log]
    for column, quantity in enumerate(("loss", "nll"), start=1):
        for name, dash in LOOKS:
            line = go.Scatter(x=steps, y=[entry[f"{name}_{quantity}"] for entry in log], mode="lines", name=name)
            line.update(line={"color": style.SETS[name], "dash": dash, "width": 2}, showlegend=column == 1)
            figure.add_trace(line.update(legendgroup=name), row=1, col=column)
    figure.update_xaxes(title="step").update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="loss", col=1).update_yaxes(title="NLL, nats per token", col=2)
    first, last = log[0], log[-1]
    moves = (f"{name} {first[f'{name}_nll']:.2f} → {last[f'{name}_nll']:.2f}" for name, _ in LOOKS)
    subtitle = f"NLL at the first and the last of {len(log)} steps, nats per token: {', '.join(moves)}."
    return finish(figure, "How the training went", subtitle, 260, titled=0)
