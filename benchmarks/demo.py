"""The demo with several seeds: one row a run in benchmarks/demo/results.json, written as soon as it is done.

    python benchmarks/demo.py --seeds 1,2,3

A seed that has its row is not run again; the runs stay in runs/demo-seedN.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from asu_interp.files import read_json, write_json

RESULTS = Path(__file__).parent / "demo" / "results.json"
SHOWN = {
    name: (f"{stem}_before{suffix}", f"{stem}_after{suffix}", f"all_heads_{stem}_after{suffix}")
    for stem in ("forget_recall", "neighbour_recall", "retain_recall")
    for suffix in ("", "_paraphrased")
    for name in [f"{stem}{suffix}"]
} | {"neutral_perplexity_ratio": ("", "neutral_perplexity_ratio", "all_heads_neutral_perplexity_ratio")}


def main(seeds: Annotated[str, typer.Option(help="seeds to run")] = "1,2,3") -> None:
    rows = read_json(RESULTS)["rows"] if RESULTS.exists() else []
    for seed in map(int, seeds.split(",")):
        if any(row["seed"] == seed for row in rows):
            continue
        out = Path("runs") / f"demo-seed{seed}"
        # a process of its own, so that its peak memory is its own
        command = [sys.executable, "-m", "asu_interp", "demo", "--out", out, "--seed", str(seed), "--resume"]
        subprocess.run(command, check=True)
        result = read_json(out / "summary.json")
        machine = f"{platform.machine()}, {platform.system()}"
        rows.append({"name": "demo", "seed": seed, "machine": machine, "metrics": result["metrics"]})
        write_json(RESULTS, {"command": "python benchmarks/demo.py", "rows": rows})
    Console().print(table(rows))


def table(rows: list[dict]) -> Table:
    """Mean and spread over the seeds."""
    shown = Table(title=f"demo, {len(rows)} seeds: mean (standard deviation)", title_justify="left")
    for column in ("", "before", "chosen heads", "all heads"):
        shown.add_column(column)
    for name, keys in SHOWN.items():
        shown.add_row(name.replace("_", " "), *(_cell([row["metrics"].get(key) for row in rows]) for key in keys))
    return shown


def _cell(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    spread = f" ({stdev(numbers):.3f})" if len(numbers) > 1 else ""
    return f"{mean(numbers):.3f}{spread}"


if __name__ == "__main__":
    typer.run(main)
