"""Static pictures of a run, for the README: python figures/make.py RUN_DIR [--out figures]

Needs the extra `pictures` (pip install 'asu-interp[pictures]') and Chrome or Chromium; BROWSER_PATH may name it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asu_interp.errors import RunError
from asu_interp.report import figures
from asu_interp.report.page import chosen_heads, draw, read_run

WANTED = ("recall", "heads", "selectivity", "response", "tokens")
WIDTH, SCALE = 960, 1.5


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run, such as runs/demo")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the pictures go")
    given = parser.parse_args(arguments)
    try:
        run = read_run(given.run)
    except RunError as error:
        sys.exit(f"error: {error}")
    drawn = {name: figure for name, figure in draw(run).items() if name in WANTED}
    by = "selectivity" if "selectivity" in run["config"].get("heads_origin", "") else "locate"
    if {"evaluation", by, "response"} <= run.keys():
        states = {name: run["evaluation"][name] for name in ("before", "after")}
        drawn["hero"] = figures.hero(states, run[by], chosen_heads(run), run["response"])
    given.out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        path = given.out / f"{name}.png"
        try:
            figure.write_image(path, width=figure.layout.width or WIDTH, height=figure.layout.height, scale=SCALE)
        except (ValueError, RuntimeError) as error:  # what Plotly raises without kaleido, or kaleido without Chrome
            sys.exit(
                f"error: {path}: {error}\npictures need pip install 'asu-interp[pictures]', and Chrome or Chromium"
            )
        print(f"{path}  {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
