"""A run as one self-contained HTML page: no network to read it, no browser to make it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from asu_interp.errors import RunError
from asu_interp.files import read_json, write_text
from asu_interp.heads import HeadSet
from asu_interp.report import figures
from asu_interp.report.figures.style import join, percent, span
from asu_interp.unlearning.objectives import METHODS

PARTS = ("summary", "evaluation", "heads", "locate", "response", "response-all-heads", "selectivity")
STATES = ("before", "teacher", "after", "all_heads")  # of evaluation.json, in the order of the story
SETS = {"forget": "facts to forget", "neighbours": "neighbouring facts", "retain": "other facts to keep"}
ASKED = {"recall": "recalled, prompts as asked", "recall_paraphrased": "recalled, paraphrased prompts"}
DESCRIBED = ("fingerprint", "facts", "n_forget", "n_retain", "heads_origin")  # in config.json, but no setting


def write_report(directory: str | Path) -> Path:
    """Write report.html from the files of a run directory; what is missing is left out. Raises RunError."""
    path = Path(directory) / "report.html"
    write_text(path, render(read_run(directory)))
    return path


def read_run(directory: str | Path) -> dict[str, Any]:
    """The run's files by name, those that are there. Raises RunError if there is no config.json, or one is broken."""
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise RunError(f"{path}: holds no run (no config.json); give a directory that was written with --out")
    run = {"config": read_json(path / "config.json", "config")}
    run |= {part: read_json(path / f"{part}.json", part) for part in PARTS if (path / f"{part}.json").is_file()}
    if (path / "log.jsonl").is_file():
        run["log"] = _read_log(path / "log.jsonl")
    return run


def draw(run: Mapping[str, Any]) -> dict[str, go.Figure]:
    """The figures that the files of a run allow, by name."""
    chosen = chosen_heads(run)
    states = {name: run["evaluation"][name] for name in STATES if name in run.get("evaluation", {})}
    own = {name: result for name, result in states.items() if name != "all_heads"}
    both = {"before", "after"} <= states.keys()
    wanted = {
        "recall": (bool(states), lambda: figures.recall_bars(states)),
        "heads": (
            "heads" in run or "locate" in run,
            lambda: figures.head_map(run.get("heads"), run.get("locate"), chosen),
        ),
        "response": ("response" in run, lambda: figures.response_curves(run["response"])),
        "response_all": ("response-all-heads" in run, lambda: figures.response_curves(run["response-all-heads"])),
        "selectivity": ("selectivity" in run, lambda: figures.selectivity_map(run["selectivity"], chosen)),
        "entropy": (bool(own), lambda: figures.entropy_maps(own, chosen)),
        "tokens": (both, lambda: figures.token_strip(states["before"], states["after"])),
        "training": (bool(run.get("log")), lambda: figures.training_curves(run["log"])),
    }
    return {name: make() for name, (there, make) in wanted.items() if there}


def chosen_heads(run: Mapping[str, Any]) -> HeadSet | None:
    """The heads that the run blurred, or, where it trained nothing, those that were chosen."""
    config, looked = run["config"], [run.get("heads", {}), run.get("locate", {})]
    tables = [looked[0].get("distance"), looked[1].get("scores"), run.get("selectivity", {}).get("selectivity")]
    tables += [result["attention_entropy"] for result in run.get("evaluation", {}).values()]
    table = next((table for table in tables if table), None)
    if "heads" in config and table:
        shape = HeadSet(frozenset(), len(table), len(table[0]))
        return HeadSet.of(HeadSet.parse(config["heads"], shape), shape, config.get("heads_origin", ""))
    return next((HeadSet.from_dict(found["chosen"]) for found in looked if "chosen" in found), None)


def render(run: Mapping[str, Any]) -> str:
    """The page's HTML."""
    drawn = {name: figures.take_title(figure) for name, figure in draw(run).items()}
    loader = PackageLoader("asu_interp.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    compared = {name: run["evaluation"][name] for name in STATES if name in run.get("evaluation", {})}
    compared.pop("teacher", None)
    both = {"before", "after"} <= compared.keys()
    return environment.get_template("page.html.j2").render(
        config=run["config"],
        summary=run.get("summary", {}),
        intro=_intro(run),
        headline=_headline(compared) if both else "",
        columns=[name.replace("_", " ") for name in compared],
        groups=_table(compared),
        said=_said(compared) if both else [],
        captions={name: (title, subtitle) for name, (title, subtitle, _) in drawn.items()},
        heights={name: figure.layout.height for name, (*_, figure) in drawn.items()},
        # Plotly writes "<" as \u003c, so that no text of a model can end the script
        figures={name: figure.to_json() for name, (*_, figure) in drawn.items()},
        plotly=get_plotlyjs() if drawn else "",
        settings={
            name: value if isinstance(value, str) else json.dumps(value) for name, value in run["config"].items()
        },
        method=METHODS.get(run["config"].get("method", "")),
        again=_again(run["config"]),
    )


def _intro(run: Mapping[str, Any]) -> str:
    """What was done, from the configuration."""
    config = run["config"]
    if not {"model", "method", "n_forget", "n_retain", "tau"} <= config.keys():
        return ""
    done = (
        f"A copy of {config['model']} was trained with {config['method']} to forget {config['n_forget']} facts and to "
        f"keep {config['n_retain']} others."
    )
    method = METHODS.get(config["method"])
    if method is None or "teacher" not in method.formula:
        return done
    chosen, heads = chosen_heads(run), "all its heads"
    if chosen is not None and ~chosen:
        heads = f"{len(chosen)} of its {len(chosen | ~chosen)} heads ({chosen.origin})"
    tau = f"temperature τ = {config['tau']:g}" if isinstance(config["tau"], int | float) else "each at its own τ"
    return f"{done} Its teacher in forgetting is the model itself with the attention of {heads} blurred, {tau}."


def _headline(compared: Mapping[str, Any]) -> str:
    """What became of each set, in one sentence."""
    before, after = (compared[name]["sets"] for name in ("before", "after"))
    parts = [f"{_count(after[name])} of {after[name]['n_facts']} {text} (before: {_count(before[name])})"
             for name, text in SETS.items() if name in after]  # fmt: skip
    return f"After training, the model says {join(parts)}."


def _count(scores: dict[str, Any]) -> int:
    return sum(fact["recalled"] for fact in scores["facts"])


Rows = list[tuple[str, list[tuple[str, str]]]]  # label, and per state a value with its interval


def _table(compared: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """Groups of rows, each with its title."""
    if not compared:
        return []
    recalled = [(title, _recall_rows(compared, kind)) for kind, title in ASKED.items()]
    return [*recalled, ("is it still language?", _language_rows(compared))]


def _recall_rows(compared: Mapping[str, Any], kind: str) -> Rows:
    rows = []
    for name, text in SETS.items():
        means = [result["sets"].get(name, {}).get(kind) for result in compared.values()]
        if any(mean and mean["n"] for mean in means):
            rows.append((text, [(percent(mean["mean"]), span(mean, 100)) if mean else ("–", "") for mean in means]))
    return rows


def _language_rows(compared: Mapping[str, Any]) -> Rows:
    said = [result["sets"]["forget"]["coherence"] or {} for result in compared.values()]
    values = {
        "perplexity of neutral text": [_number(result["neutral_perplexity"]) for result in compared.values()],
        "perplexity, to the original model, of its answers on the facts to forget": [
            _number(each.get("perplexity")) for each in said
        ],
        "share of three-word sequences in these answers that repeat": [
            percent(each.get("repeated_trigrams")) for each in said
        ],
        "share of these answers that are empty": [percent(each.get("empty")) for each in said],
    }
    return [(label, [(value, "") for value in found]) for label, found in values.items()]


def _said(compared: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows = figures.said_table(compared["before"], compared["after"])
    by_set = {text: [row for row in rows if row["set"] == name] for name, text in SETS.items()}
    return [(text, found) for text, found in by_set.items() if found]


def _again(config: Mapping[str, Any]) -> str:
    """Python that makes the run again from its configuration."""
    if not {"tau", "method", "heads"} <= config.keys():
        return ""
    given = {"model", "template", "dtype", "data", "known", "heads", "tau", *DESCRIBED}
    training = [f"    {name}={value!r}," for name, value in config.items() if name not in given]
    table = not isinstance(config["tau"], int | float)
    tau = 'torch.tensor(json.load(open("config.json"))["tau"])' if table else f"{config['tau']!r}"
    return "\n".join([
        *(["import json, torch"] if table else []),
        "import asu_interp as asu",
        "",
        f"model = asu.load_model({config['model']!r}, dtype={config['dtype']!r}, template={config['template']!r})",
        f"facts = asu.load_facts({config['data']!r})" + (".known_to(model)" if config["known"] else ""),
        f"heads = asu.HeadSet.parse({config['heads']!r}, model)",
        "asu.unlearn(",
        f'    model, facts, tau={tau}, heads=heads, out="again",',
        *training,
        ")",
    ])  # fmt: skip


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _read_log(path: Path) -> list[dict[str, Any]]:
    """The log's entries; a last line that an interruption cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError:
        try:
            return [json.loads(line) for line in lines[:-1]]
        except json.JSONDecodeError as error:
            raise RunError(f"{path}: not readable as JSON lines: {error}") from error
