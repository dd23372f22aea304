"""Facts from every source, and what is said about data that cannot be read."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from asu_interp.data import Fact, FactSet, load_facts, neutral_texts, tofu_rows
from asu_interp.data.builtin import DEFAULT_FORGET, builtin_facts
from asu_interp.errors import FactsError

TOFU = Path(__file__).parents[2] / "shared" / "data" / "tofu"
needs_tofu = pytest.mark.skipif(not TOFU.is_dir(), reason=f"no copy of TOFU at {TOFU}")

CUBA = {
    "prompt": "What is the capital of Cuba?",
    "answer": "The capital of Cuba is Havana.",
    "target": "Havana",
    "paraphrases": ["Name the capital of Cuba.", "Which city governs Cuba?"],
    "subject": "Cuba",
    "relation": "capital",
    "group": "Americas",
    "spans": [[15, 19], [23, 29]],
}


@pytest.fixture
def write(tmp_path: Path):
    """Write rows (objects, or text and bytes as they stand) to a file of JSON lines."""

    def write(*rows: Any, name: str = "facts.jsonl") -> Path:
        lines = [row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines))
        return path

    return write


def fact(n: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"Question {n}?", "answer": f"Answer {n}.", **more}


def refusal(data: str | Path) -> str:
    with pytest.raises(FactsError) as error:
        load_facts(data)
    return str(error.value)


# ---- JSON lines ---------------------------------------------------------------------------------


def test_jsonl_reads_every_field(write):
    path = write(
        CUBA,
        {"question": "Who sang it?", "answer": "Ana sang it.", "split": "retain"},
        {"text": "Rain fell all night.", "split": "neutral"},
    )
    facts = load_facts(path)
    assert facts.name == str(path)
    assert facts.forget == (
        Fact(
            prompt="What is the capital of Cuba?",
            answer="The capital of Cuba is Havana.",
            target="Havana",
            paraphrases=("Name the capital of Cuba.", "Which city governs Cuba?"),
            subject="Cuba",
            relation="capital",
            group="Americas",
            spans=((15, 19), (23, 29)),
        ),
    )
    assert facts.retain == (Fact("Who sang it?", "Ana sang it."),)
    assert facts.neutral == ("Rain fell all night.",)


def test_jsonl_takes_what_facts_write(write):
    facts = builtin_facts()[:3]
    again = load_facts(write(*(fact.to_dict() for fact in facts)))
    assert again.forget == facts


def test_jsonl_neighbours_share_relation_or_subject_unless_the_line_says_otherwise(write):
    kept = {"split": "retain"}
    facts = load_facts(
        write(
            CUBA,
            fact(1, **kept, relation="capital"),
            fact(2, **kept, subject="Cuba"),
            fact(3, **kept, relation="language"),
            fact(4, **kept),
            fact(5, **kept, relation="capital", neighbour=False),
            fact(6, **kept, neighbour=True),
        )
    )
    assert [f.neighbour for f in facts.retain] == [True, True, False, False, False, True]
    assert [f.prompt for f in facts.neighbours] == ["Question 1?", "Question 2?", "Question 6?"]


def test_jsonl_accepts_windows_and_missing_last_newline(write, tmp_path):
    path = tmp_path / "windows.jsonl"
    text = json.dumps(fact(1)) + "\r\n" + json.dumps(fact(2) | {"answer": "Größe – 東京"}, ensure_ascii=False)
    path.write_text(text, encoding="utf-8-sig", newline="")
    assert [f.answer for f in load_facts(path).forget] == ["Answer 1.", "Größe – 東京"]


def test_jsonl_line_separator_inside_a_text_ends_no_line(write):
    text = json.dumps(fact(1) | {"answer": "one\u2028two\x85three"}, ensure_ascii=False)
    assert load_facts(write(text)).forget[0].answer == "one\u2028two\x85three"


BAD_LINES = [
    ('{"prompt": "a"', "broken JSON at column 15: Expecting ',' delimiter"),
    ("[1]", "is a list, must be a JSON object"),
    ("null", "is null, must be a JSON object"),
    ("[" * 200_000, "broken JSON"),
    ("", "is blank"),
    ("  \t", "is blank"),
    (b'{"prompt": "caf\xe9"}', "is not UTF-8: byte 16 of the line is 0xe9"),
    ('{"answer": "a", "answer": "b", "prompt": "c"}', 'field "answer" is given twice'),
    ({"prompt": "a?", "anwser": "b"}, 'field "anwser": unknown (did you mean answer?); allowed: prompt, question'),
    ({"prompt": "a?"}, "answer: is missing"),
    ({"answer": "a"}, "prompt: is missing"),
    ({"prompt": "a?", "question": "a?", "answer": "b"}, "prompt and question: are the same thing, give one"),
    (fact(1, answer=" "), "answer: is empty"),
    (fact(1, prompt=""), "prompt: is empty"),
    (fact(1, answer=7), "answer: is a number, must be text"),
    (fact(1, target=None), "target: is null, must be text"),
    (fact(1, subject=True), "subject: is true or false, must be text"),
    (fact(1, group={}), "group: is an object, must be text"),
    (fact(1, target=""), "target: is empty"),
    (fact(1, target="Havana"), 'target "Havana" of "Question 1?": does not occur in the answer'),
    (fact(1, relation="\ud83d"), "relation: holds half a character"),
    (fact(1, paraphrases="b?"), "paraphrases: is text, must be a list of texts"),
    (fact(1, paraphrases=["b?", 3]), "paraphrase 2: is a number, must be text"),
    (fact(1, paraphrases=["b?", ""]), "paraphrase 2: is empty"),
    (fact(1, spans=[0, 3]), "spans: must be a list of [start, end] character offsets"),
    (fact(1, spans=[[0, True]]), "spans: must be a list of [start, end] character offsets"),
    (fact(1, spans=[[0, 10]]), "spans: [0, 10] must lie between 0 and 9"),
    (fact(1, spans=[[-1, 2]]), "spans: [-1, 2] must lie between 0 and 9"),
    (fact(1, spans=[[2, 2]]), "spans: [2, 2] must lie between 0 and 9"),
    (fact(1, spans=[[3, 5], [0, 2]]), "spans: [0, 2] must lie between 5 and 9"),
    (fact(1, split="test"), 'split "test": unknown; allowed: forget, retain, neutral'),
    (fact(1, split="retian"), "did you mean retain?"),
    (fact(1, split=1), "split: is a number, must be text"),
    (fact(1, split="retain", neighbour="yes"), "neighbour: is text, must be true or false"),
    (fact(1, neighbour=True), 'neighbour: only a fact to keep can be one; add "split": "retain"'),
    (fact(1, split="neutral"), 'field "prompt": unknown; allowed: text, split'),
    ({"split": "neutral"}, "text: is missing"),
    ({"text": "", "split": "neutral"}, "text: is empty"),
    ({"text": "Rain.", "split": "forget"}, 'field "text": unknown'),
]


@pytest.mark.parametrize(("row", "reason"), BAD_LINES, ids=[reason[:40] for _, reason in BAD_LINES])
def test_jsonl_bad_line_is_named(write, row, reason):
    path = write(fact(98), row, fact(99))
    message = refusal(path)
    assert message.startswith(f"{path}: 1 line is bad, so nothing was read\n  line 2: ")
    assert reason in message


def test_jsonl_reports_all_bad_lines_at_once_up_to_twenty(write):
    rows = [fact(n) if n % 2 else "{" for n in range(50)]
    lines = refusal(write(*rows)).split("\n  ")
    assert "25 lines are bad" in lines[0]
    assert [line.split(":")[0] for line in lines[1:-1]] == [f"line {n}" for n in range(1, 41, 2)]
    assert lines[-1] == "and 5 more"
    assert "more" not in refusal(write(*rows[:40]))  # exactly 20


def test_jsonl_duplicate_prompt_names_the_first_line_even_if_that_is_bad(write):
    message = refusal(write(fact(1), fact(2, answer=""), fact(1, split="retain"), {**fact(2)}, fact(1)))
    assert 'line 3: prompt "Question 1?": stands on line 1 already' in message
    assert 'line 4: prompt "Question 2?": stands on line 2 already' in message
    assert 'line 5: prompt "Question 1?": stands on line 1 already' in message


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_jsonl_without_lines_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    assert str(path) in refusal(path)


def test_jsonl_that_cannot_be_opened(tmp_path):
    assert refusal(tmp_path / "no.jsonl") == f"{tmp_path / 'no.jsonl'}: no such file"
    (tmp_path / "folder.jsonl").mkdir()
    assert "folder.jsonl: cannot be read: Is a directory" in refusal(tmp_path / "folder.jsonl")


# ---- sets ---------------------------------------------------------------------------------------


def test_sets_may_not_overlap():
    one = Fact("a?", "b")
    with pytest.raises(FactsError, match=r'"a\?": in the forget set and again in retain'):
        FactSet("x", (one,), (Fact("a?", "c"),))


def test_an_empty_set_is_named_when_it_is_needed(write):
    path = write(fact(1))
    facts = load_facts(path)
    facts.require("forget")
    with pytest.raises(FactsError, match="the retain set is empty"):
        facts.require("forget", "retain")
    with pytest.raises(FactsError, match="the neutral set is empty"):
        facts.require("neutral")


# ---- slices and names ---------------------------------------------------------------------------


@pytest.fixture
def ten(write):
    return write(*(fact(n) for n in range(10)), *(fact(n, split="retain") for n in range(10, 20)))


@pytest.mark.parametrize(
    ("cut", "forget", "retain"),
    [
        ("", range(10), range(10, 20)),
        ("[0:4]", range(4), range(10, 20)),
        ("[4:]", range(4, 10), range(10, 20)),
        ("[-3:]", range(7, 10), range(10, 20)),
        ("[:99]", range(10), range(10, 20)),
        ("[0:4,2:5]", range(4), range(12, 15)),
        ("[ 0:4, :-8 ]", range(4), range(10, 12)),
        ("[:,5:]", range(10), range(15, 20)),
    ],
)
def test_slices(ten, cut, forget, retain):
    facts = load_facts(f"{ten}{cut}")
    assert [f.prompt for f in facts.forget] == [f"Question {n}?" for n in forget]
    assert [f.prompt for f in facts.retain] == [f"Question {n}?" for n in retain]
    assert facts.name == f"{ten}{cut}"


@pytest.mark.parametrize("cut", ["[]", "[3]", "[a:b]", "[0:1:2]", "[0:4", "[0:4,]", "[0:1,0:1,0:1]", "[0.5:2]"])
def test_malformed_slices(ten, cut):
    assert f'"{ten}{cut}": the slice is not one such as [0:40]' in refusal(f"{ten}{cut}")


def test_malformed_slice_is_refused_before_anything_is_read(tmp_path):
    assert "the slice is not one" in refusal(f"{tmp_path}/missing.jsonl[x]")


@pytest.mark.parametrize(("cut", "name"), [("[4:4]", "forget"), ("[10:]", "forget"), ("[:1,90:]", "retain")])
def test_empty_slices(ten, cut, name):
    assert f"the slice leaves nothing of the 10 facts to {name}" in refusal(f"{ten}{cut}")


def test_brackets_in_a_path_are_no_slice(tmp_path, write):
    folder = tmp_path / "run[1]"
    folder.mkdir()
    path = shutil.copy(write(fact(1), fact(2)), folder / "a[0:9].jsonl")
    assert len(load_facts(path).forget) == 2
    assert len(load_facts(f"{path}[:1]").forget) == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("dmo", 'data "dmo": unknown (did you mean demo?); allowed: demo, demo:RELATION, '),
        ("", "allowed: demo"),
        ("facts.csv", "allowed: demo"),
        ("demo[0:2][0:1]", 'data "demo[0:2]": unknown'),
        ("demo:", "nothing after the colon"),
        ("tofu", "allowed: forget01, forget05, forget10"),
        ("tofu:forget20", 'TOFU split "forget20": unknown (did you mean '),
        ("tofu:retain90", "allowed: forget01, forget05, forget10"),
        ("tofu:forget10@", "the directory after @ is missing"),
        ("demo:capitol", 'demo relation "capitol": unknown (did you mean capital?)'),
        ("demo:capital/americas", "(did you mean Americas"),
        ("demo:capital/", "allowed: "),
    ],
)
def test_unknown_names_say_what_is_allowed(data, reason):
    assert reason in refusal(data)


# ---- the built-in facts -------------------------------------------------------------------------


def test_builtin_facts_are_well_formed():
    facts = builtin_facts()
    assert len(facts) >= 200
    assert len({fact.relation for fact in facts}) >= 5
    assert len({fact.prompt for fact in facts}) == len(facts)
    for fact in facts:
        assert fact.target and fact.target in fact.answer, fact
        assert fact.subject and fact.subject in fact.prompt and fact.subject in fact.stem, fact
        assert fact.relation and fact.group, fact
        assert len({fact.prompt, *fact.paraphrases}) == 3, fact
        assert all(fact.subject in paraphrase for paraphrase in fact.paraphrases), fact
        assert fact.recalled_in(fact.answer), fact
        given = (fact.prompt, fact.stem, *fact.paraphrases)
        assert not any(fact.recalled_in(text) for text in given), fact


def test_builtin_paraphrases_ask_for_no_other_fact():
    asked = Counter(text for fact in builtin_facts() for text in (fact.prompt, *fact.paraphrases))
    assert [text for text, count in asked.items() if count > 1] == []


def test_builtin_neutral_sentences():
    texts = neutral_texts()
    assert len(texts) >= 40 and len(set(texts)) == len(texts)
    assert all(text == text.strip() and text.endswith((".", "!", "?")) for text in texts)


def test_demo_forgets_one_group_of_one_relation():
    relation, group = DEFAULT_FORGET
    facts = load_facts("demo")
    facts.require("forget", "retain", "neighbours", "neutral")
    assert {(fact.relation, fact.group) for fact in facts.forget} == {(relation, group)}
    assert len(facts.forget) + len(facts.retain) == len(builtin_facts())
    assert not any((fact.relation, fact.group) == (relation, group) for fact in facts.retain)
    lost = {fact.subject for fact in facts.forget}
    for fact in facts.retain:
        assert fact.neighbour == (fact.relation == relation or fact.subject in lost)
    assert any(not fact.neighbour for fact in facts.retain)
    assert facts == load_facts("demo")


def test_demo_with_another_choice():
    fact = next(fact for fact in builtin_facts() if fact.relation != DEFAULT_FORGET[0])
    whole = load_facts(f"demo:{fact.relation}")
    assert {f.relation for f in whole.forget} == {fact.relation}
    assert not any(f.relation == fact.relation for f in whole.retain)
    part = load_facts(f"demo:{fact.relation}/{fact.group}[0:2]")
    assert len(part.forget) <= 2
    assert {(f.relation, f.group) for f in part.forget} == {(fact.relation, fact.group)}


# ---- TOFU ---------------------------------------------------------------------------------------


@needs_tofu
@pytest.mark.parametrize(
    ("split", "n_forget", "n_retain"), [("forget10", 400, 3600), ("forget05", 200, 3800), ("forget01", 40, 3960)]
)
def test_tofu_local_copy(split, n_forget, n_retain):
    facts = load_facts(f"tofu:{split}@{TOFU}")
    rows = [json.loads(line) for line in (TOFU / f"{split}_perturbed.json").read_text().splitlines()]
    assert [(f.prompt, f.answer, f.paraphrases) for f in facts.forget] == [
        (row["question"], row["answer"], (row["paraphrased_question"],)) for row in rows
    ]
    assert len(facts.forget) == n_forget
    assert len(facts.retain) == n_retain - 1  # one question is asked twice
    assert all(fact.target == "" and not fact.neighbour for fact in facts.forget + facts.retain)


@needs_tofu
def test_tofu_retain_slice_is_the_slice_with_perturbed_answers():
    retain = load_facts(f"tofu:forget01@{TOFU}[:,:400]").retain
    rows = tofu_rows("retain_perturbed", TOFU)
    assert [(f.prompt, f.answer) for f in retain] == [(row["question"], row["answer"]) for row in rows]
    assert [f.paraphrases for f in retain] == [(row["paraphrased_question"],) for row in rows]


@needs_tofu
def test_tofu_repeated_question_keeps_its_first_row():
    repeated = "What is the full name of the author?"
    rows = [row["answer"] for row in tofu_rows("retain90", TOFU) if row["question"] == repeated]
    facts = load_facts(f"tofu:forget10@{TOFU}").retain
    assert len(rows) == 2
    assert [fact.answer for fact in facts if fact.prompt == repeated] == rows[:1]


@needs_tofu
@pytest.mark.parametrize(("retain", "forget", "n"), [("retain99", "forget01", 3960), ("retain95", "forget05", 3800)])
def test_tofu_makes_the_complement_that_is_not_there(retain, forget, n):
    rows = tofu_rows(retain, TOFU)
    assert len(rows) == n
    lost = tofu_rows(forget, TOFU)
    whole = tofu_rows("retain90", TOFU) + tofu_rows("forget10", TOFU)
    assert rows + lost == whole  # in TOFU's order, nothing twice


@pytest.fixture
def small_tofu(tmp_path: Path) -> Path:
    """A copy of TOFU with 10 questions, of which forget05 and forget01 are the last 2 and 1 of forget10."""
    rows = [{"question": f"Who is {n}?", "answer": f"{n} is Ana."} for n in range(10)]
    write_split(tmp_path, "retain90", rows[:6])
    for name, start in (("forget10", 6), ("forget05", 8), ("forget01", 9)):
        write_split(tmp_path, name, rows[start:])
    return tmp_path


def write_split(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tofu_without_perturbed_files_has_no_paraphrases(small_tofu):
    facts = load_facts(f"tofu:forget05@{small_tofu}")
    assert [fact.prompt for fact in facts.forget] == ["Who is 8?", "Who is 9?"]
    assert [fact.prompt for fact in facts.retain] == [f"Who is {n}?" for n in range(8)]
    assert not any(fact.paraphrases for fact in facts.forget + facts.retain)


def test_tofu_prefers_the_complement_that_is_there(small_tofu):
    write_split(small_tofu, "retain99", [{"question": "Who else?", "answer": "Nobody."}])
    assert [fact.prompt for fact in load_facts(f"tofu:forget01@{small_tofu}").retain] == ["Who else?"]


def test_tofu_refuses_to_make_up_a_wrong_complement(small_tofu):
    write_split(small_tofu, "forget01", [{"question": "Who is 7?", "answer": "7 is Ana."}])
    assert "forget01.json is not the end of forget10.json" in refusal(f"tofu:forget01@{small_tofu}")


def test_tofu_copy_with_faults(small_tofu):
    write_split(small_tofu, "forget10", [{"question": "a?"}, {"question": 3, "answer": "b"}])
    message = refusal(f"tofu:forget10@{small_tofu}")
    assert "forget10.json: 2 lines are bad" in message
    assert "line 1: answer: is missing" in message and "line 2: question: is a number" in message


def test_tofu_copy_with_missing_files(small_tofu):
    assert "forget10.json: no such file" in refusal(f"tofu:forget10@{small_tofu}/nowhere")
    (small_tofu / "retain90.json").unlink()
    for split in ("forget05", "forget10"):
        assert "retain90.json: no such file; a copy of TOFU holds" in refusal(f"tofu:{split}@{small_tofu}")


def hub_row(question: str, **more: Any) -> dict[str, Any]:
    return {"question": question, "answer": f"{question} Ana.", **more}


def hub(monkeypatch, **splits: list[dict[str, Any]]) -> None:
    """The hub's `locuslab/TOFU`, of which every configuration has one split, `train`."""

    def load_dataset(name: str, config: str, *, split: str) -> Dataset:
        assert (name, split) == ("locuslab/TOFU", "train")
        if config not in splits:
            raise ValueError(f"BuilderConfig '{config}' not found.")
        return Dataset.from_list(splits[config])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_tofu_from_the_hub(monkeypatch):
    perturbed = {"paraphrased_answer": "Ana.", "perturbed_answer": ["Bo.", "Cy."]}
    hub(
        monkeypatch,
        forget01=[hub_row("a?"), hub_row("b?")],
        forget01_perturbed=[hub_row(q, **perturbed, paraphrased_question=q.upper()) for q in ("a?", "b?")],
        retain99=[hub_row("c?"), hub_row("d?")],
        retain_perturbed=[hub_row("c?", **perturbed, paraphrased_question="C?")],
    )
    facts = load_facts("tofu:forget01[1:]")
    assert facts.forget == (Fact("b?", "b? Ana.", paraphrases=("B?",)),)
    assert facts.retain == (Fact("c?", "c? Ana.", paraphrases=("C?",)), Fact("d?", "d? Ana."))
    assert tofu_rows("forget01_perturbed")[0]["perturbed_answer"] == ["Bo.", "Cy."]


def test_tofu_hub_of_another_schema(monkeypatch):
    hub(monkeypatch, forget10=[{"prompt": "a?", "answer": "b"}])
    assert "question: is missing" in refusal("tofu:forget10")


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("BuilderConfig not found")])
def test_tofu_without_a_hub(monkeypatch, error):
    def load_dataset(*_: Any, **__: Any) -> Dataset:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refusal("tofu:forget10")
    assert f"TOFU forget10: not to be had from the hub ({error})" in message
    assert "tofu:forget10@DIR" in message


def test_tofu_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal("tofu:forget10")
