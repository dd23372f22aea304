"""Figures and the page: the same from objects and from their JSON, the numbers of the results, and nothing unsafe."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

from asu_interp.data.facts import Fact
from asu_interp.errors import RunError
from asu_interp.evaluation.coherence import Coherence
from asu_interp.evaluation.judge import Evaluation, SetScores
from asu_interp.files import write_json
from asu_interp.heads import HeadSet
from asu_interp.lens.locality import HeadClasses
from asu_interp.lens.patching import HeadScores
from asu_interp.lens.response import HeadSelectivity, TemperatureResponse, TokenClasses, TokenScores
from asu_interp.report import figures
from asu_interp.report.figures import style, tokens
from asu_interp.report.figures.heads import score_sentence
from asu_interp.report.page import chosen_heads, draw, read_run, write_report
from asu_interp.unlearning.trainer import Training

LAYERS, HEADS = 5, 3
EVIL = "<script>alert(1)</script> $x$ </script><b>bold</b>"


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def set_scores(name: str, n: int, share: float, seed: int, paraphrased: bool = True) -> SetScores:
    facts = tuple(
        Fact(f"What is the capital of {name} {i}?", f"The capital of {name} {i} is City{i}.", f"City{i}")
        for i in range(n)
    )
    words = tuple((" The", " capital", " of", f" {name}", f" {i}", " is", f" City{i}", ".") for i in range(n))
    recalled = torch.arange(n) < round(share * n)
    return SetScores(
        facts=facts,
        said=tuple(f" {f.target}." if said else " the the the" for f, said in zip(facts, recalled, strict=True)),
        recalled=recalled,
        paraphrases_recalled=recalled[: n // 2] if paraphrased else torch.zeros(0, dtype=torch.bool),
        paraphrase_fact=tuple(range(n // 2)) if paraphrased else (),
        tokens=TokenScores(4 * rand(8 * n, seed=seed), rand(8 * n, seed=seed) - 0.3),
        classes=TokenClasses(
            torch.tensor([False, False, False, True, True, False, True, False] * n),
            torch.arange(n).repeat_interleave(8),
        ),
        token_texts=words,
        coherence=Coherence(12.5, 0.1, 0.9, 0.0, n),
    )


def evaluation(seed: int, share: float = 1.0, size: int = 4, shape: tuple[int, int] = (LAYERS, HEADS)) -> Evaluation:
    sets = {
        "forget": set_scores("Cuba", size, share, seed),
        "neighbours": set_scores("Peru", size - 1, 1.0, seed + 1),
        "retain": set_scores("Iron", size + 1, 1.0, seed + 2, paraphrased=False),
    }
    return Evaluation("tiny", sets, 20.0 + seed, 3 * rand(*shape, seed=seed))


def response(lost_at: float | None = 2.0) -> TemperatureResponse:
    """Four factual and four functional tokens; the factual ones are lost from `lost_at` on."""
    taus, factual = (1.0, 2.0, 3.0), torch.tensor([True, False] * 4)
    margin = torch.ones(3, 8)
    for i, tau in enumerate(taus):
        if lost_at is not None and tau >= lost_at:
            margin[i, factual] = -1.0
    untouched = TokenScores(rand(8), torch.ones(8))
    fact = torch.arange(4).repeat_interleave(2)
    return TemperatureResponse(taus, "1.*", rand(3, 8), margin, rand(3, LAYERS, HEADS), factual, fact, untouched)


def chosen() -> HeadSet:
    return HeadSet.parse("1.0-1,4.2", HeadSet(frozenset(), LAYERS, HEADS))


def classes() -> HeadClasses:
    return HeadClasses(
        9 * rand(LAYERS, HEADS, seed=1),
        5 * rand(LAYERS, HEADS, seed=2),
        rand(LAYERS, HEADS, seed=3),
        0.3,
        False,
        0.5,
        7,
    )


def located() -> HeadScores:
    return HeadScores(rand(3, LAYERS, HEADS, seed=4) - 0.4, (("a", "b"),) * 3, "denoising", (), ())


def selectivity() -> HeadSelectivity:
    return HeadSelectivity(4.0, rand(LAYERS, HEADS, seed=5) - 0.5, rand(LAYERS, HEADS, seed=6), 12, 20)


LOG = [
    {"step": i + 1, "forget_loss": 2 / (i + 1), "retain_loss": 0.1 * i, "forget_nll": 1.0 + i, "retain_nll": 1.0}
    for i in range(6)
]
BUILDERS: dict[str, tuple[Any, list[Any]]] = {
    "head_map": (figures.head_map, [classes(), located(), chosen()]),
    "selectivity_map": (figures.selectivity_map, [selectivity(), chosen()]),
    "entropy_maps": (
        lambda *states: figures.entropy_maps(dict(zip(("before", "teacher", "after"), states, strict=True)), chosen()),
        [evaluation(0), evaluation(1), evaluation(2)],
    ),
    "response_curves": (figures.response_curves, [response()]),
    "token_strip": (figures.token_strip, [evaluation(0), evaluation(3)]),
    "recall_bars": (
        lambda *states: figures.recall_bars(dict(zip(("before", "after"), states, strict=True))),
        [evaluation(0), evaluation(3, 0.5)],
    ),
    "hero": (
        lambda before, after, *rest: figures.hero({"before": before, "after": after}, *rest),
        [evaluation(0), evaluation(3, 0.5), located(), chosen(), response()],
    ),
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    before, after = evaluation(0), evaluation(3, 0.25)
    config = {
        "model": "tiny", "fingerprint": "abc", "template": "bare", "dtype": "float32", "data": "demo", "known": True,
        "n_forget": 4, "n_retain": 8,
        "heads": str(chosen()), "heads_origin": "top 3", "tau": 2.5, "method": "asu-kl", "epochs": 2,
        "learning_rate": 1e-5, "lora_rank": None, "seed": 0,
    }  # fmt: skip
    states = {"before": before, "teacher": evaluation(1, 0.5), "after": after, "all_heads": evaluation(2, 0.0)}
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / "evaluation.json", {name: state.to_dict() for name, state in states.items()})
    write_json(tmp_path / "heads.json", classes().to_dict())
    write_json(tmp_path / "locate.json", located().to_dict())
    write_json(tmp_path / "response.json", response().to_dict())
    write_json(tmp_path / "response-all-heads.json", response(None).to_dict())
    write_json(tmp_path / "selectivity.json", selectivity().to_dict())
    summary = {"status": "done", "metrics": {"wall_seconds": 4.0}, "unavailable": {"speed": "was not measured"}}
    write_json(tmp_path / "summary.json", summary)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    return tmp_path


def traces(figure: go.Figure, kind: type, name: str | None = None) -> list[Any]:
    return [t for t in figure.data if isinstance(t, kind) and (name is None or t.name == name)]


def turned(table: torch.Tensor) -> list[list[float]]:
    return table.T.tolist()


def subtitle(figure: go.Figure) -> str:
    return figure.layout.meta["subtitle"].replace("\u00a0", " ")


@pytest.mark.parametrize("name", BUILDERS)
def test_objects_and_their_json_give_the_same_figure(name: str) -> None:
    build, results = BUILDERS[name]
    read_back = [json.loads(json.dumps(result.to_dict(), allow_nan=False)) for result in results]
    assert build(*results).to_json() == build(*read_back).to_json()


def font_sizes(part: Any, inside: str = "") -> list[int]:
    if isinstance(part, dict):
        own = [part["size"]] if "font" in inside and "size" in part else []
        return own + [size for key, value in part.items() for size in font_sizes(value, key)]
    return [size for value in part for size in font_sizes(value, inside)] if isinstance(part, list | tuple) else []


@pytest.mark.parametrize("name", BUILDERS)
def test_axes_have_titles_and_type_is_legible(name: str) -> None:
    build, results = BUILDERS[name]
    figure = build(*results)
    assert min(font_sizes(json.loads(figure.to_json()))) >= 12
    assert all(axis.title.text for axis in figure.select_xaxes() if axis.visible is not False and axis.ticktext is None)
    assert figure.layout.meta["title"] and subtitle(figure).endswith(".")


def test_head_map_shows_scores_classes_sinks_and_chosen() -> None:
    found, scored = classes(), located()
    figure = figures.head_map(found, scored, chosen())
    scores, kinds = traces(figure, go.Heatmap)
    assert [list(row) for row in scores.z] == turned(scored.scores)
    expected = (found.mid.mask + 2 * found.global_.mask).T.tolist()
    assert [list(row) for row in kinds.z] == expected
    sinks = next(t for t in traces(figure, go.Scatter) if t.name and t.name.startswith("sink"))
    assert set(zip(sinks.x, sinks.y, strict=True)) == found.sinks.pairs
    frames = [t for t in traces(figure, go.Scatter) if t.mode == "lines"]
    assert all(t.x.count(None) == len(chosen()) for t in frames)
    middles = {(round((a + b) / 2), round((c + d) / 2)) for a, b, c, d in
               zip(frames[0].x[::6], frames[0].x[1::6], frames[0].y[::6], frames[0].y[2::6], strict=True)}  # fmt: skip
    assert middles == chosen().pairs


def test_head_map_tells_everything_on_pointing() -> None:
    found, scored = classes(), located()
    text = traces(figures.head_map(found, scored, chosen()), go.Heatmap)[0].hovertext[1][4]
    mean = scored.interval(4, 1)
    assert "layer 4, head 1" in text and f"{mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}]" in text
    assert f"d = {found.distance[4, 1]:.1f} tokens" in text and "sink share" in text and "class " in text
    assert "(chosen)" not in text
    assert "(chosen)" in traces(figures.head_map(found, scored, chosen()), go.Heatmap)[0].hovertext[2][4]


def test_head_map_of_one_result_alone() -> None:
    assert len(traces(figures.head_map(classes()), go.Heatmap)) == 1
    assert len(traces(figures.head_map(located=located()), go.Heatmap)) == 1
    with pytest.raises(RunError, match="classes of the heads"):
        figures.head_map()


def test_all_heads_chosen_marks_nothing() -> None:
    figure = figures.head_map(located=located(), chosen=chosen() | ~chosen())
    assert not traces(figure, go.Scatter)


def test_score_sentence_counts_the_heads_that_hold_most() -> None:
    scores = {"scores": [[5.0, 3.0, -9.0], [1.0, 1.0, 0.0]]}
    assert score_sentence(scores).replace("\u00a0", " ") == "2 of 6 heads hold 80 % of the positive patching score"
    none = {"scores": [[-1.0, 0.0]]}
    assert score_sentence(none).startswith("0 of 2")


def test_maps_mark_the_sign_and_are_white_at_zero() -> None:
    table = torch.tensor([[1.0, -1.0], [0.0, -0.05]])
    drawn = traces(figures.selectivity_map(HeadSelectivity(4.0, table, torch.zeros(2, 2), 1, 1)), go.Heatmap)[0]
    assert (drawn.zmin, drawn.zmax) == (-1.0, 1.0)
    assert [list(row) for row in drawn.text] == [["", ""], ["−", ""]]


def test_selectivity_map_shows_the_difference() -> None:
    result = selectivity()
    figure = figures.selectivity_map(result)
    assert [list(row) for row in traces(figure, go.Heatmap)[0].z] == turned(result.selectivity)
    layer, head = divmod(int(result.selectivity.argmax()), HEADS)
    assert f"Most selective is {layer}.{head}" in subtitle(figure)


@pytest.mark.parametrize("scores", [located(), selectivity()])
def test_hero_maps_the_scores_that_the_heads_were_chosen_by(scores: Any) -> None:
    figure = figures.hero({"before": evaluation(0), "after": evaluation(3, 0.5)}, scores, chosen(), response())
    table = scores.scores if isinstance(scores, HeadScores) else scores.selectivity
    assert [list(row) for row in traces(figure, go.Heatmap)[0].z] == turned(table)
    asked, paraphrased = (bar.y[0] for bar in traces(figure, go.Bar, "forget, after"))
    assert asked == 50.0 and paraphrased == 100 * evaluation(3, 0.5).sets["forget"].recall_paraphrased.mean
    assert list(traces(figure, go.Scatter, "factual tokens")[0].y) == [0.0, 100.0, 100.0]


def test_entropy_maps_share_a_scale_and_show_the_change() -> None:
    states = {"before": evaluation(0), "teacher": evaluation(1), "after": evaluation(2)}
    maps = traces(figures.entropy_maps(states), go.Heatmap)
    assert [[list(row) for row in m.z] for m in maps[:3]] == [turned(state.entropy) for state in states.values()]
    assert len({(m.zmin, m.zmax) for m in maps[:3]}) == 1 and len({(m.zmin, m.zmax) for m in maps[3:]}) == 1
    change = (states["after"].entropy - states["before"].entropy).T
    assert torch.allclose(torch.tensor(maps[4].z), change, atol=1e-6)


def test_entropy_of_one_state_has_no_change() -> None:
    assert len(traces(figures.entropy_maps({"after": evaluation(0)}), go.Heatmap)) == 1


def test_response_curves_show_means_and_intervals() -> None:
    result = response()
    figure = figures.response_curves(result)
    for name in ("factual", "functional"):
        for quantity, scale, trace, band in zip(
            ("nll", "lost"), (1, 100), traces(figure, go.Scatter, f"{name} tokens"),
            traces(figure, go.Scatter, f"{name} interval"), strict=True,
        ):  # fmt: skip
            means = result.by_class[name][quantity]
            assert list(trace.y) == [scale * m.mean for m in means]
            assert [list(pair) for pair in trace.customdata] == [[scale * m.low, scale * m.high] for m in means]
            assert list(band.y) == [scale * m.high for m in means] + [scale * m.low for m in reversed(means)]


def test_response_curves_say_whether_there_is_a_good_temperature() -> None:
    good, none = figures.response_curves(response(2.0)), figures.response_curves(response(None))
    assert "At τ = 2 and τ = 3, but none below or above (shaded), at least 50 % of factual" in subtitle(good)
    assert [s for s in good.layout.shapes if s.type == "rect"] and not [
        s for s in none.layout.shapes if s.type == "rect"
    ]
    assert (
        "At no τ of the grid (1 to 3)" in subtitle(none)
        and f"{HEADS} of {LAYERS * HEADS} heads" in none.layout.meta["title"]
    )


def test_response_curves_leave_out_a_class_without_tokens() -> None:
    found = response().to_dict()
    empty = {"mean": None, "low": None, "high": None, "n": 0}
    found["by_class"]["functional"] = {quantity: [empty] * 3 for quantity in ("nll", "lost")}
    assert not traces(figures.response_curves(found), go.Scatter, "functional tokens")[0].x


def test_token_strip_shows_the_change_of_every_token() -> None:
    before, after = evaluation(0), evaluation(3)
    figure = figures.token_strip(before, after, "neighbours", n=2)
    boxes = traces(figure, go.Bar)[0]
    change = (after.sets["neighbours"].tokens.nll - before.sets["neighbours"].tokens.nll)[:16]
    assert torch.allclose(torch.tensor(boxes.customdata), change)
    underlined = traces(figure, go.Scatter, "factual token")[0]
    assert underlined.x.count(None) == int(before.sets["neighbours"].classes.factual[:16].sum())
    assert "2 of 3 facts of the neighbours set" in subtitle(figure)


def test_token_strip_breaks_long_lines() -> None:
    scores = evaluation(0).to_dict()
    fact = scores["sets"]["forget"]["facts"][0]
    fact |= {"tokens": [" antidisestablishmentarianism"] * 9, "factual": [True] * 9, "nll": [1.0] * 9}
    boxes = traces(figures.token_strip(scores, scores, n=1), go.Bar)[0]
    assert len(set(boxes.y)) == 3
    assert max(start + width for start, width in zip(boxes.base, boxes.x, strict=True)) <= tokens.WIDEST


def test_figures_show_text_as_it_is() -> None:
    assert style.safe("<b>$x$ & y") == "&lt;b&gt;&#36;x&#36; &amp; y"
    assert style.safe(" ") == "␣" and style.safe("\n") == "↵"


def test_recall_bars_show_means_and_intervals() -> None:
    states = {"before": evaluation(0), "after": evaluation(3, 0.5)}
    figure = figures.recall_bars(states)
    for name, state in states.items():
        for set_name, scores in state.sets.items():
            drawn = traces(figure, go.Bar, f"{set_name}, {name}")
            means = [m for m in (scores.recall, scores.recall_paraphrased) if m.n]
            assert [bar.y[0] for bar in drawn] == [100 * m.mean for m in means]
            for bar, m in zip(drawn, means, strict=True):
                assert bar.error_y.array[0] == pytest.approx(100 * (m.high - m.mean))
                assert bar.error_y.arrayminus[0] == pytest.approx(100 * (m.mean - m.low))
                assert bar.marker.color == style.SETS[set_name]
    assert "forget 100 % → 50 %" in subtitle(figure)


def test_recall_bars_of_one_state() -> None:
    assert subtitle(figures.recall_bars({"after": evaluation(0, 0.5)})).startswith("forget 50 %")


def test_training_curves_show_the_log() -> None:
    figure = figures.training_curves(LOG)
    for name in ("forget", "retain"):
        loss, nll = traces(figure, go.Scatter, name)
        assert list(loss.y) == [entry[f"{name}_loss"] for entry in LOG] and list(loss.x) == [1, 2, 3, 4, 5, 6]
        assert list(nll.y) == [entry[f"{name}_nll"] for entry in LOG]
    assert "forget 1.00 → 6.00" in subtitle(figure)


def test_said_table_has_a_row_per_fact() -> None:
    rows = figures.said_table(evaluation(0), evaluation(3, 0.5))
    assert len(rows) == 4 + 3 + 5
    assert rows[3] == {
        "set": "forget", "prompt": "What is the capital of Cuba 3?", "stem": "The capital of Cuba 3 is",
        "target": "City3", "before": " City3.", "after": " the the the",
        "recalled_before": True, "recalled_after": False,
    }  # fmt: skip


def test_evaluations_of_different_facts_are_not_compared() -> None:
    with pytest.raises(RunError, match='"forget" set is empty, or not the same facts'):
        figures.said_table(evaluation(0), evaluation(0, size=5))
    with pytest.raises(RunError, match='"nonsense" set'):
        figures.token_strip(evaluation(0), evaluation(0), "nonsense")


def luminance(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_colours_differ_in_grey() -> None:
    for palette in (style.SETS, style.CLASSES):
        greys = sorted(map(luminance, palette.values()))
        assert all(b - a > 0.15 for a, b in pairwise(greys))
    for scale in (style.DIVERGING, style.DIVERGING_FINE):
        greys = [luminance(color) for _, color in scale]
        middle = [position for position, _ in scale].index(0.5)
        assert greys[middle:] == sorted(greys[middle:], reverse=True) and greys[-1] < 0.2 < 0.5 < greys[0]
    assert [luminance(c) for _, c in style.SEQUENTIAL] == sorted(
        (luminance(c) for _, c in style.SEQUENTIAL), reverse=True
    )


def test_the_page_holds_every_figure_and_the_numbers(run_dir: Path) -> None:
    path = write_report(run_dir)
    page = path.read_text(encoding="utf-8")
    names = {"recall", "heads", "response", "response_all", "selectivity", "entropy", "tokens", "training"}
    assert set(re.findall(r'id="figure-(\w+)"', page)) == names == set(draw(read_run(run_dir)))
    assert "the model says 1 of 4 facts to forget (before: 4), 3 of 3 neighbouring facts (before: 3)" in page
    assert "3 of its 15 heads (top 3) blurred" in page and "was not measured" in page
    assert '<span class="mark" title="does not say the target">✗</span> the the the' in page
    assert path.name == "report.html" and not list(run_dir.glob(".report*"))


def test_the_page_needs_no_network(run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert page.count("plotly.js v") == 1 and len(page) < 6_000_000
    scripts = re.findall(r"<script>.*?</script>", page, flags=re.DOTALL)
    rest = page
    for script in scripts:
        rest = rest.replace(script, "")
    assert len(scripts) == 2
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|url\(|https?://""", rest)


def test_no_text_of_a_model_becomes_markup(run_dir: Path) -> None:
    content = json.loads((run_dir / "evaluation.json").read_text())
    for state in content.values():
        fact = state["sets"]["forget"]["facts"][0]
        fact |= {"said": EVIL, "prompt": EVIL, "stem": EVIL, "target": EVIL}
        fact["tokens"] = [EVIL] * len(fact["tokens"])
    write_json(run_dir / "evaluation.json", content)
    config = json.loads((run_dir / "config.json").read_text())
    write_json(run_dir / "config.json", config | {"model": EVIL, "data": EVIL, "heads_origin": EVIL})
    write_json(run_dir / "summary.json", {"status": EVIL, "metrics": {EVIL: 1.0}, "unavailable": {EVIL: EVIL}})
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "<script>alert" not in page and "<b>bold" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("</script>") == page.count("<script>") == 2


@pytest.mark.parametrize("missing", ["evaluation", "heads", "locate", "response", "response-all-heads", "selectivity",
                                     "summary", "log"])  # fmt: skip
def test_a_missing_file_leaves_its_part_out(run_dir: Path, missing: str) -> None:
    next(run_dir.glob(f"{missing}.json*")).unlink()
    page = write_report(run_dir).read_text(encoding="utf-8")
    gone = {
        "evaluation": ["recall", "entropy", "tokens"], "response": ["response"], "selectivity": ["selectivity"],
        "response-all-heads": ["response_all"], "log": ["training"],
    }.get(missing, [])  # fmt: skip
    assert not [name for name in gone if f'id="figure-{name}"' in page]
    assert 'id="figure-heads"' in page


def test_a_configuration_alone_makes_a_page(run_dir: Path) -> None:
    for path in run_dir.iterdir():
        if path.name != "config.json":
            path.unlink()
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "Settings" in page and "<figure>" not in page and len(page) < 20_000


def test_an_evaluation_of_one_state_makes_a_page(run_dir: Path) -> None:
    write_json(run_dir / "evaluation.json", {"after": evaluation(0).to_dict()})
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert 'id="figure-recall"' in page and 'id="figure-tokens"' not in page


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run \(no config.json\)"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_broken_file_is_named(run_dir: Path) -> None:
    (run_dir / "heads.json").write_text('{"rho": ')
    with pytest.raises(RunError, match=r"heads .*heads\.json: not readable as JSON"):
        write_report(run_dir)


def test_a_log_that_was_cut_off_is_read_up_to_there(run_dir: Path) -> None:
    with (run_dir / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert len(read_run(run_dir)["log"]) == len(LOG)


def test_chosen_heads_are_those_that_the_run_blurred(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert chosen_heads(run) == chosen()
    run["heads"]["chosen"] = (~chosen()).to_dict()
    assert chosen_heads(run) == chosen()
    del run["config"]["heads"]
    assert chosen_heads(run) == ~chosen()


def test_the_way_to_run_it_again_is_python_with_known_settings(run_dir: Path) -> None:
    page = write_report(run_dir).read_text(encoding="utf-8")
    code = re.search(r"<pre><code>(.*?)</code></pre>", page, flags=re.DOTALL)
    assert code
    calls = [node for node in ast.walk(ast.parse(style.html.unescape(code[1]))) if isinstance(node, ast.Call)]
    unlearn = next(call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "unlearn")
    allowed = {field.name for field in fields(Training)} | {"tau", "heads", "out"}
    assert {keyword.arg for keyword in unlearn.keywords} <= allowed
    assert {"method", "epochs", "learning_rate", "lora_rank", "seed"} <= {keyword.arg for keyword in unlearn.keywords}


def chromium() -> str:
    path = os.environ.get("CHROME") or shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        pytest.skip("no Chromium: install one or name it in CHROME")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_draws_every_figure_in_a_browser_without_network(run_dir: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path, seen = write_report(run_dir), []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": width, "height": 900}, offline=True).new_page()
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("request", lambda request: seen.append(request.url) if request.url.startswith("http") else None)
        page.goto(path.as_uri())
        page.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        sizes = page.eval_on_selector_all(
            ".plot", "plots => plots.map(p => { const b = p.querySelector('.main-svg').getBoundingClientRect();"
                     " return [p.id, b.width, b.height, p.querySelectorAll('.trace, .hm, .bars').length]; })",
        )  # fmt: skip
        overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    assert not seen
    assert len(sizes) == 8 and all(wide > 300 and high > 100 and drawn for _, wide, high, drawn in sizes), sizes
    assert overflow <= 0


def make_pictures() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "figures" / "make.py"))


def test_pictures_need_a_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no run"):
        make_pictures()["main"]([str(tmp_path)])


def test_pictures_say_what_to_install(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("Image export requires the kaleido package")

    monkeypatch.setattr(go.Figure, "write_image", fail)
    with pytest.raises(SystemExit, match=r"asu-interp\[pictures\]"):
        make_pictures()["main"]([str(run_dir), "--out", str(run_dir / "pictures")])


@pytest.mark.slow
def test_pictures_are_small_files(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    monkeypatch.setenv("BROWSER_PATH", chromium())
    make_pictures()["main"]([str(run_dir), "--out", str(run_dir / "pictures")])
    pictures = sorted((run_dir / "pictures").glob("*.png"))
    assert [picture.stem for picture in pictures] == ["heads", "hero", "recall", "response", "selectivity", "tokens"]
    assert all(1_000 < picture.stat().st_size < 300_000 for picture in pictures)
