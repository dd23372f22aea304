"""Where does this model keep that fact, and can I take it out?

    import asu_interp as asu
    model = asu.load_model("smollm2-135m")
    facts = asu.load_facts("demo").known_to(model)
    where = asu.head_selectivity(model, facts.forget[:3])
    run = asu.unlearn(model, facts, tau=2.5, heads=where.top(80))
    after = asu.evaluate(run.model, facts, baseline=model)

The names below are the public interface; each is imported when it is first used, so that `asu-interp --help` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asu_interp.data import Fact, FactSet, load_facts
    from asu_interp.errors import AsuError
    from asu_interp.evaluation.judge import evaluate
    from asu_interp.heads import HeadSet
    from asu_interp.lens.attention import attention_entropy
    from asu_interp.lens.locality import classify_heads
    from asu_interp.lens.patching import locate_heads
    from asu_interp.lens.response import classify_tokens, head_selectivity, temperature_response
    from asu_interp.lens.temperature import smoothed
    from asu_interp.models import Model, load_model
    from asu_interp.report.page import write_report
    from asu_interp.unlearning.trainer import unlearn

_HOME = {
    "AsuError": "asu_interp.errors",
    "Fact": "asu_interp.data",
    "FactSet": "asu_interp.data",
    "HeadSet": "asu_interp.heads",
    "Model": "asu_interp.models",
    "attention_entropy": "asu_interp.lens.attention",
    "classify_heads": "asu_interp.lens.locality",
    "classify_tokens": "asu_interp.lens.response",
    "evaluate": "asu_interp.evaluation.judge",
    "head_selectivity": "asu_interp.lens.response",
    "load_facts": "asu_interp.data",
    "load_model": "asu_interp.models",
    "locate_heads": "asu_interp.lens.patching",
    "smoothed": "asu_interp.lens.temperature",
    "temperature_response": "asu_interp.lens.response",
    "unlearn": "asu_interp.unlearning.trainer",
    "write_report": "asu_interp.report.page",
}

__all__ = [
    "AsuError",
    "Fact",
    "FactSet",
    "HeadSet",
    "Model",
    "attention_entropy",
    "classify_heads",
    "classify_tokens",
    "evaluate",
    "head_selectivity",
    "load_facts",
    "load_model",
    "locate_heads",
    "smoothed",
    "temperature_response",
    "unlearn",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asu_interp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
