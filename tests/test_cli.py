"""The command line, as a user types it: on a saved tiny model and a JSON-lines file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families import load_family
from test_lens import facts_of

from asu_interp.cli import main
from asu_interp.evaluation.summary import NAMES

TRAIN = ["--epochs", "2", "--lr", "1e-3", "--batch-size", "2", "--retain-batch-size", "2"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and facts in it."""
    directory = tmp_path_factory.mktemp("cli")
    load_family("llama").save(directory / "model")
    rows = [
        fact.to_dict() | {"split": "forget" if i < 3 else "retain", "paraphrases": [f"the sea of {fact.subject} is"]}
        for i, fact in enumerate(facts_of(5))
    ]
    rows += [{"text": "the coast is in the north and so on.", "split": "neutral"}]
    # prompts of one length, so that subjects can be swapped
    for row in rows[:3]:
        row["prompt"] = row["prompt"].replace("so ", "")
    (directory / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return directory


class Done:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `asu-interp ARGS` in an empty directory; MODEL and DATA stand for the workplace's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asu_interp.lens.patching.MIN_DIFFERENCE", 0.0)

    def call(*args: str) -> Done:
        names = {"MODEL": str(workplace / "model"), "DATA": str(workplace / "facts.jsonl")}
        monkeypatch.setattr(sys, "argv", ["asu-interp", *(names.get(arg, arg) for arg in args)])
        with pytest.raises(SystemExit) as stopped:
            main()  # typer always ends in SystemExit
        out, err = capsys.readouterr()
        return Done(int(stopped.value.code or 0), out, err)

    return call


COMMANDS = ["demo", "doctor", "heads", "response", "locate", "unlearn", "evaluate", "methods", "report"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0 and f"Example: asu-interp {command}" in " ".join(done.out.split())


def test_doctor_lists_the_checks(run) -> None:
    done = run("doctor", "MODEL", "--json")
    result = json.loads(done.out)
    assert done.code == 0
    names = [check["name"] for check in result["checks"]]
    assert names == ["parity", "generation", "left padding", "temperature seam"]
    assert all(check["passed"] for check in result["checks"])
    assert (result["n_layers"], result["n_heads"]) == (3, 4)


def test_doctor_exits_1_when_a_check_fails(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asu_interp.models.health.TOLERANCE", dict.fromkeys([__import__("torch").float32], -1.0))
    done = run("doctor", "MODEL")
    assert done.code == 1 and "FAILED" in done.out


def test_looking_saves_what_it_prints(run, tmp_path: Path) -> None:
    for command, args in {
        "heads": ["--rho", "0.25"],
        "response": ["--tau", "1,2", "--per-head", "--top", "5"],
        "locate": ["--top", "4"],
    }.items():
        done = run(command, "MODEL", "--data", "DATA", "--json", *args)
        assert done.code == 0, done.err
        assert json.loads(done.out) == json.loads((tmp_path / f"{command}.json").read_text())
    assert len(json.loads((tmp_path / "heads.json").read_text())["distance"]) == 3
    chosen = json.loads((tmp_path / "response.json").read_text())["chosen"]
    assert chosen["n_heads"] == 4 and "selectivity" in chosen["origin"]


def test_unlearn_evaluate_report(run, tmp_path: Path) -> None:
    run("locate", "MODEL", "--data", "DATA", "--top", "4")
    (tmp_path / "tau.json").write_text(json.dumps([[2.0] * 4, [3.0] * 4, [1.0] * 4]))
    done = run("unlearn", "MODEL", "--data", "DATA", "--heads", "locate.json", "--tau", "tau.json",
               "--out", "run", "--json", *TRAIN)  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["heads_selected"] == 4
    assert all(isinstance(value, float | int) for value in summary["metrics"].values())
    for name in NAMES.values():
        for when in ("before", "after"):
            key = f"{name}_recall_{when}"
            assert (key in summary["metrics"]) != (key in summary["unavailable"])
    # every kept fact of this file shares the relation with the forgotten ones
    assert "there are no facts in the retain set" in summary["unavailable"]["retain_recall_after"]
    assert (tmp_path / "run" / "report.html").is_file()
    refused = run("unlearn", "MODEL", "--data", "DATA", "--out", "run", *TRAIN)
    assert refused.code == 2 and "holds a run already" in refused.err
    done = run("evaluate", "run/model", "--data", "DATA", "--baseline", "MODEL", "--json")
    assert set(json.loads(done.out)) == {"before", "after"}
    (tmp_path / "run" / "report.html").unlink()
    assert run("report", "run").code == 0 and (tmp_path / "run" / "report.html").is_file()


def test_comparing_a_model_with_itself_warns(run) -> None:
    done = run("evaluate", "MODEL", "--data", "DATA", "--baseline", "MODEL")
    assert done.code == 0 and "the same weights" in done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["heads", "no-such-model", "--data", "DATA"], 'model "no-such-model"'),
        (["heads", "MODEL", "--data", "no-such-data"], 'data "no-such-data"'),
        (["heads", "MODEL", "--data", "DATA", "--rho", "0.9"], "rho = 0.9"),
        (["heads", "MODEL", "--data", "DATA", "--template", "verse"], 'template "verse"'),
        (["heads", "MODEL", "--data", "DATA", "--dtype", "int3"], 'dtype "int3"'),
        (["response", "MODEL", "--data", "DATA", "--tau", "1,warm"], 'tau "1,warm"'),
        (["response", "MODEL", "--data", "DATA", "--tau", "1,-2"], "tau = -2"),
        (["response", "MODEL", "--data", "DATA", "--heads", "9.1"], "layer 9, this model has layers 0-2"),
        (["locate", "MODEL", "--data", "DATA", "--top", "99"], "top 99: 12 heads"),
        (["unlearn", "MODEL", "--data", "DATA", "--out", "run", "--method", "magic"], 'method "magic"'),
        (["unlearn", "MODEL", "--data", "DATA", "--out", "run", "--heads", "missing.json"], "no such file"),
        (["unlearn", "MODEL", "--data", "DATA", "--out", "run", "--tau", "nan"], "tau = nan"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(run, tmp_path: Path, args: list[str], message: str) -> None:
    done = run(*args)
    assert done.code == 2
    assert message in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_resumes_to_the_same_weights(workplace: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of training, in a process of its own."""
    command = [
        sys.executable, "-c", "from asu_interp.cli import main; main()", "unlearn", str(workplace / "model"),
        "--data", str(workplace / "facts.jsonl"), "--epochs", "300", "--lr", "1e-4", "--batch-size", "1",
        "--retain-batch-size", "1",
    ]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], **quiet)
    log = tmp_path / "killed" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 30:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model").exists()
    subprocess.run([*command, "--out", str(tmp_path / "killed"), "--resume"], check=True, **quiet)
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, **quiet)
    killed, whole = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert killed == whole
    assert len(log.read_text().splitlines()) == 900


def test_a_reader_finds_nothing_of_this_machine_in_saved_files(run, tmp_path: Path) -> None:
    run("unlearn", "MODEL", "--data", "DATA", "--out", "run", *TRAIN)
    for path in (tmp_path / "run").rglob("*.json*"):
        assert "_original_component" not in path.read_text(encoding="utf-8"), path
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert os.sep not in str(config.get("_name_or_path", ""))
