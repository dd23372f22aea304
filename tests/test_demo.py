"""The main job in small, on the real model: every file it promises, and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import asu_interp.demo as demo_module
from asu_interp.demo import run_demo
from asu_interp.errors import RunError
from asu_interp.heads import HeadSet

SMALL = {"data": "demo:capital/Asia[0:4,0:12]", "max_pairs": 1, "selectivity_facts": 1, "judged_retain": 8}
PROMISED = [
    "forget_recall_before", "forget_recall_after", "neighbour_recall_before", "neighbour_recall_after",
    "neutral_perplexity_ratio", "heads_selected", "wall_seconds", "peak_rss_mb",
    "all_heads_forget_recall_after", "forget_recall_after_paraphrased", "all_heads_forget_recall_after_paraphrased",
    "teacher_forget_recall_after",
]  # fmt: skip
FILES = ["config.json", "evaluation.json", "heads.json", "locate.json", "log.jsonl", "report.html",
         "response-all-heads.json", "response.json", "selectivity.json", "status.json", "summary.json"]  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "TRAINING", demo_module.TRAINING | {"epochs": 2})
        patch.setattr(demo_module, "TAUS", (1.0, 3.0))
        run_demo(directory, **SMALL)
    return directory


@pytest.mark.slow
def test_a_finished_demo_that_is_resumed_says_the_same(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "TRAINING", demo_module.TRAINING | {"epochs": 2})
    monkeypatch.setattr(demo_module, "TAUS", (1.0, 3.0))
    first = json.loads((out / "summary.json").read_text())["metrics"]
    again = run_demo(out, **SMALL, resume=True)["metrics"]
    changing = ("wall_seconds", "peak_rss_mb")
    assert all(first[key] == again[key] for key in first if key not in changing)


def test_it_writes_what_it_promises(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == sorted(FILES)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["all-heads", "model"]
    summary = json.loads((out / "summary.json").read_text())
    assert set(PROMISED) <= set(summary["metrics"])
    assert all(isinstance(value, float | int) for value in summary["metrics"].values())
    assert summary["metrics"]["heads_selected"] == demo_module.N_HEADS
    assert not set(summary["metrics"]) & set(summary["unavailable"])
    # all facts to keep of this slice stand next to the forgotten ones
    assert "no facts" in summary["unavailable"]["retain_recall_after"]
    assert (out / "all-heads" / "report.html").is_file()


def test_its_pieces_agree(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    chosen = HeadSet.from_dict(json.loads((out / "heads.json").read_text())["chosen"])
    selectivity = torch.tensor(json.loads((out / "selectivity.json").read_text())["selectivity"])
    assert HeadSet.parse(config["heads"], chosen) == chosen == HeadSet.top(selectivity, len(chosen))
    evaluation = json.loads((out / "evaluation.json").read_text())
    metrics = json.loads((out / "summary.json").read_text())["metrics"]
    for name in ("after", "all_heads"):
        facts = evaluation[name]["sets"]["forget"]["facts"]
        prefix = "all_heads_" if name == "all_heads" else ""
        assert metrics[f"{prefix}forget_recall_after"] == sum(fact["recalled"] for fact in facts) / len(facts)
    # the selective teacher raises the entropy of what it smooths
    before, teacher = (torch.tensor(evaluation[name]["attention_entropy"]) for name in ("before", "teacher"))
    assert (teacher - before)[chosen.mask].mean() > 0.1


def test_plain_transformers_loads_the_model(out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    fact = json.loads((out / "evaluation.json").read_text())["after"]["sets"]["forget"]["facts"][0]
    ids = tokenizer(f"{fact['prompt']} {fact['stem']}", return_tensors="pt")
    said = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True) == fact["said"]


def test_a_directory_that_holds_a_run_is_refused_before_anything_is_loaded(out: Path) -> None:
    with pytest.raises(RunError, match="holds a run already"):
        run_demo(out, model_name="this would fail later")


@pytest.mark.slow
def test_the_whole_demo_forgets_and_keeps(tmp_path: Path) -> None:
    """On a seed that nothing was tuned on; about seven minutes on two cores."""
    metrics = run_demo(tmp_path / "run", seed=4)["metrics"]
    assert metrics["forget_recall_after"] <= 0.2 * metrics["forget_recall_before"]
    assert metrics["retain_recall_after"] >= 0.9 * metrics["retain_recall_before"]
    assert metrics["neighbour_recall_after"] >= 0.75 * metrics["neighbour_recall_before"]
    assert metrics["neutral_perplexity_ratio"] <= 1.05
    assert metrics["peak_rss_mb"] < 6 * 1024
