"""The command line: parse, call one function, print and save its result."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asu_interp.errors import AsuError, HeadError, TemperatureError
from asu_interp.files import read_json, write_json

# Heavy imports wait inside the commands, so that --help answers at once.
if TYPE_CHECKING:
    from torch import Tensor

    from asu_interp.data import FactSet
    from asu_interp.heads import HeadSet
    from asu_interp.models import Model

app = typer.Typer(
    help="Find the attention heads that carry a fact, blur exactly those, and get a model that has forgotten it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
out_console, console = Console(), Console(stderr=True)

ModelArg = Annotated[str, typer.Argument(help="smollm2-135m, a hub id, a Hugging Face directory, or a .gguf file")]
Data = Annotated[str, typer.Option(help="demo, demo:RELATION/GROUP, FILE.jsonl, tofu:forget10[@DIR]; [a:b] slices")]
Known = Annotated[bool, typer.Option("--known", help="keep only the facts that the model recalls greedily")]
Heads = Annotated[str, typer.Option(help='"all", "6-8.*", "3.4,10.0-2", or a JSON file that holds heads')]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]
TemplateOpt = Annotated[str, typer.Option(help="how prompts are put: bare, qa or chat")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a run that is there already")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")]
Seed = Annotated[int, typer.Option(help="seed of everything random")]


def main() -> None:
    """Entry point: bad input is one clear line and exit status 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        app()
    except AsuError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("interrupted; a run with --out goes on with --resume")
        sys.exit(130)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="directory of the run")] = Path("runs/demo"),
    model: Annotated[str, typer.Option(help="the model to make forget")] = "smollm2-135m",
    data: Data = "demo",
    seed: Seed = 0,
    pairs: Annotated[int | None, typer.Option(help="prompt pairs to patch between; 0: all")] = 6,
    selectivity_facts: Annotated[int | None, typer.Option(help="facts to smooth single heads on; 0: all")] = 3,
    judged_retain: Annotated[int | None, typer.Option(help="facts to keep that are judged; 0: all")] = 100,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """The main job on the built-in model and facts: look, forget, judge, report.

    Example: asu-interp demo --out runs/demo
    """
    from asu_interp.demo import run_demo

    result = run_demo(
        out, model_name=model, data=data, seed=seed, max_pairs=pairs or None,
        selectivity_facts=selectivity_facts or None, judged_retain=judged_retain or None,
        overwrite=overwrite, resume=resume,
        say=lambda text: console.print(f"[dim]·[/] {escape(text)}", highlight=False),
    )  # fmt: skip
    _show(result, as_json, _summary_table(result, ("", "all_heads_")))
    console.print(f"open [bold]{escape(str(out / 'report.html'))}[/] in a browser", highlight=False)


@app.command()
def doctor(
    model: ModelArg,
    dtype: Dtype = "float32",
    device: Device = "auto",
    template: TemplateOpt = "bare",
    as_json: AsJson = False,
) -> None:
    """Check a model: parity, cached generation, padding, temperature seam; exit status 1 if a check fails.

    Example: asu-interp doctor smollm2-135m
    """
    from asu_interp.models import load_model

    loaded = load_model(model, dtype=dtype, device=device, template=template, check=False)
    table = _table(model, ("check", "", "what was seen"))
    for check in loaded.checks:
        table.add_row(check.name, "[green]ok[/]" if check.passed else "[red]FAILED[/]", escape(check.detail))
    shape = f"{loaded.n_layers} layers of {loaded.n_heads} query heads"
    table.add_row("heads", "", shape)
    result = {"model": model, "n_layers": loaded.n_layers, "n_heads": loaded.n_heads,
              "checks": [check.to_dict() for check in loaded.checks]}  # fmt: skip
    _show(result, as_json, table)
    if not all(check.passed for check in loaded.checks):
        raise typer.Exit(1)


@app.command()
def heads(
    model: ModelArg,
    data: Data = "demo",
    known: Known = False,
    rho: Annotated[float, typer.Option(help="fraction of all heads that is local, and that is global")] = 0.3,
    exclude_sinks: Annotated[bool, typer.Option(help="rank by the distance without the first token")] = False,
    out: Annotated[Path, typer.Option(help="where to save the result")] = Path("heads.json"),
    dtype: Dtype = "float32",
    device: Device = "auto",
    template: TemplateOpt = "bare",
    as_json: AsJson = False,
) -> None:
    """Local, mid and global heads by average backward distance, on the facts to keep.

    Example: asu-interp heads smollm2-135m --data demo --known
    """
    from asu_interp.lens.locality import classify_heads

    loaded, facts = _load(model, data, known, dtype, device, template)
    facts.require("retain")
    result = classify_heads(loaded, facts.retain, rho=rho, exclude_sinks=exclude_sinks)
    table = _table(f"heads of {model}", ("class", "number", "heads"))
    for name, chosen in (("local", result.local), ("global", result.global_), ("sinks", result.sinks)):
        table.add_row(name, str(len(chosen)), str(chosen))
    _save(result.to_dict(), out, as_json, table)


@app.command()
def response(
    model: ModelArg,
    data: Data = "demo",
    known: Known = False,
    tau: Annotated[str, typer.Option(help="the grid of temperatures")] = "1,1.5,2,2.5,3,4",
    heads: Heads = "all",
    per_head: Annotated[bool, typer.Option("--per-head", help="smooth one head at a time, at the last tau")] = False,
    top: Annotated[int, typer.Option(help="with --per-head: heads to choose by selectivity")] = 80,
    out: Annotated[Path, typer.Option(help="where to save the result")] = Path("response.json"),
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    template: TemplateOpt = "bare",
    as_json: AsJson = False,
) -> None:
    """NLL, margin and lost tokens by token class under temperature, on the facts to forget.

    Example: asu-interp response smollm2-135m --data demo --known --tau 1,1.5,2,3
    """
    from asu_interp.lens.response import head_selectivity, temperature_response

    taus = _floats(tau)
    loaded, facts = _load(model, data, known, dtype, device, template)
    facts.require("forget")
    result = temperature_response(loaded, facts.forget, taus, heads=_heads(heads, loaded), seed=seed)
    table = _table(f"answers of {model} under temperature", ("tau", *_response_columns()))
    for i, value in enumerate(taus):
        table.add_row(f"{value:g}", *(str(result.by_class[c][q][i]) for c, q in _RESPONSE))
    content = result.to_dict()
    if per_head:
        selectivity = head_selectivity(loaded, facts.forget, taus[-1])
        content |= {"per_head": selectivity.to_dict(), "chosen": selectivity.top(top).to_dict()}
    _save(content, out, as_json, table)
    interval = f"{result.interval[0]:g} to {result.interval[1]:g}" if result.interval else "none on this grid"
    console.print(f"tau at which facts go (>= 50 % lost) and language stays (<= 10 %): {interval}")


_RESPONSE = tuple((c, q) for q in ("nll", "lost") for c in ("factual", "functional"))


def _response_columns() -> Iterable[str]:
    return (f"{'NLL (nats)' if quantity == 'nll' else 'share lost'}, {name}" for name, quantity in _RESPONSE)


@app.command()
def locate(
    model: ModelArg,
    data: Data = "demo",
    known: Known = False,
    top: Annotated[int, typer.Option(help="heads to choose")] = 80,
    pairs: Annotated[int, typer.Option(help="prompt pairs to patch between; 0: all")] = 0,
    noising: Annotated[bool, typer.Option("--noising", help="patch corrupted outputs into the clean run")] = False,
    out: Annotated[Path, typer.Option(help="where to save the result")] = Path("locate.json"),
    dtype: Dtype = "float32",
    device: Device = "auto",
    template: TemplateOpt = "bare",
    as_json: AsJson = False,
) -> None:
    """Activation patching: which heads carry the facts to forget.

    Example: asu-interp locate smollm2-135m --data demo --known --top 80
    """
    from asu_interp.lens.patching import locate_heads

    loaded, facts = _load(model, data, known, dtype, device, template)
    facts.require("forget")
    direction: Any = "noising" if noising else "denoising"
    result = locate_heads(loaded, facts.forget, max_pairs=pairs or None, direction=direction)
    chosen = result.top(top)
    table = _table(f"{direction}, mean over {len(result.pairs)} pairs", ("head", "score", "95 % interval"))
    for layer, head in sorted(result.top(min(top, 12)), key=lambda pair: -float(result.scores[pair])):
        mean = result.interval(layer, head)
        table.add_row(f"{layer}.{head}", f"{mean.mean:.3f}", f"{mean.low:.3f} to {mean.high:.3f}")
    _save(result.to_dict() | {"chosen": chosen.to_dict()}, out, as_json, table)
    for reason in result.unaligned:
        console.print(f"not paired: {escape(reason)}", highlight=False)


@app.command()
def unlearn(
    model: ModelArg,
    out: Annotated[Path, typer.Option(help="directory of the run")],
    data: Data = "demo",
    known: Known = False,
    method: Annotated[str, typer.Option(help="see `asu-interp methods`")] = "asu-kl",
    heads: Heads = "all",
    tau: Annotated[str, typer.Option(help="temperature of the forget-teacher: a number, or a JSON table")] = "2.5",
    epochs: int = 20,
    lr: Annotated[float, typer.Option(help="learning rate")] = 2e-5,
    batch_size: int = 16,
    retain_batch_size: int = 16,
    forget_weight: Annotated[float, typer.Option(help="lambda, the weight of the forget loss")] = 1.0,
    accumulation: Annotated[int, typer.Option(help="pieces that a batch is cut into")] = 1,
    lora_rank: Annotated[int | None, typer.Option(help="train adapters of this rank, not all weights")] = None,
    stop_forget_nll: Annotated[float | None, typer.Option(help="stop at this mean forget NLL (nats)")] = None,
    stop_retain_rise: Annotated[float | None, typer.Option(help="stop when retain NLL rose by so much")] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dtype: Dtype = "float32",
    device: Device = "auto",
    template: TemplateOpt = "bare",
    as_json: AsJson = False,
) -> None:
    """Fine-tune a copy of the model until it has forgotten, and judge it.

    Example: asu-interp unlearn smollm2-135m --data demo --known --heads locate.json --tau 2.5 --out runs/mine
    """
    from asu_interp.evaluation.judge import check_facts
    from asu_interp.evaluation.judge import evaluate as judge
    from asu_interp.evidence import judge_run, write_evidence
    from asu_interp.unlearning.run import check_directory
    from asu_interp.unlearning.trainer import Training
    from asu_interp.unlearning.trainer import unlearn as train

    started = time.perf_counter()
    check_directory(out, overwrite=overwrite, resume=resume)
    settings: dict[str, Any] = {
        "method": method, "epochs": epochs, "learning_rate": lr, "batch_size": batch_size,
        "retain_batch_size": retain_batch_size, "forget_weight": forget_weight, "accumulation": accumulation,
        "lora_rank": lora_rank, "stop_forget_nll": stop_forget_nll, "stop_retain_rise": stop_retain_rise, "seed": seed,
    }  # fmt: skip
    Training(**settings)  # bad settings are refused before the model is loaded
    temperature = _tau(tau)
    loaded, facts = _load(model, data, known, dtype, device, template)
    chosen = _heads(heads, loaded)
    check_facts(loaded, facts)
    run = train(loaded, facts, tau=temperature, heads=chosen, out=out, overwrite=overwrite, resume=resume, **settings)
    before = judge(loaded, facts)
    judged = judge_run(run, loaded, facts, tau=temperature, heads=chosen, before=before)
    result = write_evidence(out, run.record, judged, seconds=time.perf_counter() - started)
    _show(result, as_json, _summary_table(result, ("",)))


@app.command()
def evaluate(
    model: ModelArg,
    data: Data = "demo",
    known: Annotated[bool, typer.Option("--known", help="keep only the facts that the baseline recalls")] = False,
    baseline: Annotated[str | None, typer.Option(help="the model to compare with: the original")] = None,
    out: Annotated[Path, typer.Option(help="where to save the result")] = Path("evaluation.json"),
    dtype: Dtype = "float32",
    device: Device = "auto",
    template: TemplateOpt = "bare",
    as_json: AsJson = False,
) -> None:
    """Recall, NLL and margins by token class, coherence and perplexity; beside a baseline if one is given.

    Example: asu-interp evaluate runs/demo/model --data demo --known --baseline smollm2-135m
    """
    from asu_interp.data import load_facts
    from asu_interp.evaluation.judge import evaluate as judge
    from asu_interp.models import load_model

    facts = load_facts(data)
    loaded = load_model(model, dtype=dtype, device=device, template=template)
    original = load_model(baseline, dtype=dtype, device=device, template=template) if baseline else None
    if original is not None and original.fingerprint() == loaded.fingerprint():
        console.print("[yellow]warning:[/] the model and its baseline have the same weights")
    if known:
        facts = facts.known_to(original or loaded)
    result = judge(loaded, facts, baseline=original)
    content = {"after": result.to_dict()}
    if result.baseline is not None:
        content = {"before": result.baseline.to_dict(), **content}
    table = _table(f"{model} on {facts.name}", ("facts", "number", "recall", "paraphrased", "before"))
    for name, scores in result.sets.items():
        before = str(result.baseline.sets[name].recall) if result.baseline else ""
        table.add_row(name, str(len(scores.facts)), str(scores.recall), str(scores.recall_paraphrased), before)
    _save(content, out, as_json, table)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """The unlearning methods, with formula and source.

    Example: asu-interp methods
    """
    from asu_interp.unlearning.objectives import METHODS

    table = _table("methods", ("name", "loss", "arXiv"))
    for method in METHODS.values():
        table.add_row(method.name, escape(method.formula), method.source)
    rows = [{"name": m.name, "formula": m.formula, "source": m.source} for m in METHODS.values()]
    _show({"methods": rows}, as_json, table)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="directory of a run")]) -> None:
    """Write report.html of a run anew.

    Example: asu-interp report runs/demo
    """
    from asu_interp.report.page import write_report

    console.print(f"wrote {escape(str(write_report(directory)))}", highlight=False)


def _load(model: str, data: str, known: bool, dtype: str, device: str, template: str) -> tuple[Model, FactSet]:
    from asu_interp.data import load_facts
    from asu_interp.models import load_model

    facts = load_facts(data)  # first: a mistake in it costs no model load
    loaded = load_model(model, dtype=dtype, device=device, template=template)
    return loaded, facts.known_to(loaded) if known else facts


def _heads(text: str, model: Model) -> HeadSet | None:
    from asu_interp.heads import HeadSet

    if text == "all":
        return None
    if not text.endswith(".json"):
        return HeadSet.parse(text, model)
    content = read_json(Path(text), "heads")
    if not isinstance(content, dict) or not {"chosen", "heads"} & content.keys():
        raise HeadError(
            f"heads {text}: holds no chosen heads; `asu-interp locate` and `asu-interp response --per-head` write some"
        )
    return HeadSet.from_dict(content.get("chosen", content)).require(model)


def _tau(text: str) -> float | Tensor:
    import torch

    if text.endswith(".json"):
        try:
            return torch.tensor(read_json(Path(text), "tau"), dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise TemperatureError(f"tau {text}: not a table of numbers ({error})") from error
    numbers = _floats(text)
    if len(numbers) != 1:
        raise TemperatureError(f'tau "{text}": one number, or a JSON file with a table [layer][head]')
    return numbers[0]


def _floats(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise TemperatureError(f'tau "{text}": not a list of numbers such as 1,1.5,2') from None


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _summary_table(result: dict[str, Any], prefixes: tuple[str, ...]) -> Table:
    names = {"": "after", "all_heads_": "after, all heads"}
    table = _table(f"{result['model']} on {result['data']}", ("", "before", *(names[p] for p in prefixes)))
    metrics = result["metrics"]
    for name in ("forget_recall", "retain_recall", "neighbour_recall"):
        for suffix in ("", "_paraphrased"):
            cells = [metrics.get(f"{name}_before{suffix}")]
            cells += [metrics.get(f"{prefix}{name}_after{suffix}") for prefix in prefixes]
            table.add_row((name + suffix).replace("_", " "), *(_number(cell) for cell in cells))
    ratios = [metrics.get(f"{prefix}neutral_perplexity_ratio") for prefix in prefixes]
    table.add_row("neutral perplexity, ratio", "1.000", *(_number(ratio) for ratio in ratios))
    return table


def _number(value: float | None) -> str:
    return "not available" if value is None else f"{value:.3f}"


def _show(result: dict[str, Any], as_json: bool, table: Table) -> None:
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        out_console.print(table)


def _save(result: dict[str, Any], out: Path, as_json: bool, table: Table) -> None:
    write_json(out, result)
    _show(result, as_json, table)
    console.print(f"saved {escape(str(out))}", highlight=False)
