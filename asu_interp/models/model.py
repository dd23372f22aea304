"""The model as the rest of the toolkit sees it: load, encode, score, generate, copy, save."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from asu_interp.errors import FactsError, ModelError
from asu_interp.files import new_directory
from asu_interp.models.health import Check, check_model, probe_tokens, reference_logits
from asu_interp.models.seams import Seam
from asu_interp.models.sources import check_versions, load_source, no_progress_bar, plain_model, token_count
from asu_interp.models.template import Template
from asu_interp.models.weights import named_weights, write_back_fused

if TYPE_CHECKING:
    from asu_interp.data.batches import Batch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Model:
    """A Hugging Face decoder under TransformerLens hook points, with its tokenizer and prompt template."""

    bridge: TransformerBridge
    tokenizer: Any
    template: Template
    name: str
    checks: list[Check]
    verified_seam: Seam | None
    weights: dict[str, Tensor] = field(repr=False)  # Hugging Face name -> live tensor

    @property
    def hf(self) -> PreTrainedModel:
        """The wrapped Hugging Face model; its forward fires the hooks of `bridge`."""
        return cast(PreTrainedModel, self.bridge.original_model)

    @property
    def n_layers(self) -> int:
        return self.bridge.cfg.n_layers

    @property
    def n_heads(self) -> int:
        """Query heads per layer (under grouped-query attention there are fewer key/value heads)."""
        return self.bridge.cfg.n_heads

    @property
    def context(self) -> int:
        """The longest sequence the model was made for, in tokens."""
        return self.bridge.cfg.n_ctx

    @property
    def device(self) -> torch.device:
        return next(self.bridge.parameters()).device

    @property
    def seam(self) -> Seam:
        """Where attention can be divided by a temperature. Raises ModelError if nowhere."""
        if self.verified_seam is None:
            raise ModelError(next(c.detail for c in self.checks if c.name == "temperature seam"))
        return self.verified_seam

    @property
    def end_token(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def pad_token(self) -> int:
        """What stands under the padding; masks are made from lengths, so any id will do."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else (self.end_token or 0)

    def fingerprint(self) -> str:
        """A short hash of the weights, to tell whether a file was made from this very model."""
        write_back_fused(self.bridge)
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            sums = torch.stack([tensor.detach().double().sum(), tensor.detach().double().square().sum()])
            digest.update(f"{name} {tuple(tensor.shape)} {sums.tolist()}".encode())
        return digest.hexdigest()[:16]

    def encode(self, prompt: str, answer: str = "", *, end: bool = True) -> tuple[list[int], list[int]]:
        """Token ids of the rendered prompt and of the answer (with the end token unless `end` is False).

        Raises FactsError if the prompt or a given answer has no tokens, or both exceed the context.
        """
        text = self.template.prompt(prompt, self.tokenizer)
        special = self.template.adds_special_tokens
        prompt_ids = self.tokenizer(text, add_special_tokens=special).input_ids
        # A tokenizer that closes every text with its end token would end the prompt before the answer.
        while (
            prompt_ids
            and prompt_ids[-1] == self.end_token
            and special
            and not text.endswith(self.tokenizer.eos_token or "\0")
        ):
            prompt_ids = prompt_ids[:-1]
        if not prompt_ids:
            raise FactsError(f'prompt "{prompt}": no tokens, so nothing to predict the answer from')
        answer_ids: list[int] = []
        if answer:
            answer_ids = self._continue(text, prompt_ids, self.template.separator + answer)
            if not answer_ids:
                raise FactsError(f'answer "{answer}" to "{prompt}": no tokens')
            if end and self.end_token is not None:
                answer_ids = [*answer_ids, self.end_token]
        length = len(prompt_ids) + len(answer_ids)
        if length > self.context:
            raise FactsError(
                f'"{prompt[:60]}": {length} tokens, this model reads at most {self.context}; shorten or leave it out'
            )
        return prompt_ids, answer_ids

    def encode_cue(self, prompt: str, stem: str = "") -> list[int]:
        """Token ids of the rendered prompt and the beginning of an answer, to be continued."""
        prompt_ids, stem_ids = self.encode(prompt, stem, end=False)
        return prompt_ids + stem_ids

    def _continue(self, text: str, prompt_ids: list[int], continuation: str) -> list[int]:
        """Ids of the continuation as they come out in the joined text, where the prompt's ids stay the same."""
        special = self.template.adds_special_tokens
        joined = self.tokenizer(text + continuation, add_special_tokens=special).input_ids
        if joined[: len(prompt_ids)] == prompt_ids:
            ids = joined[len(prompt_ids) :]
            return ids[:-1] if ids and ids[-1] == self.end_token and special else ids
        return self.tokenizer(continuation, add_special_tokens=False).input_ids

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; every module's mode is put back at the end."""
        modes = [(module, module.training) for module in self.bridge.modules()]
        self.bridge.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def answer_logits(self, batch: Batch) -> Float[Tensor, "token vocab"]:
        """Logits that predict each answer token of the batch, in the order of `batch.targets`.

        Only these positions are unembedded: the rest of the [batch, pos, vocab] tensor is never built.
        """
        batch = batch.to(self.device)

        def gather(hidden: Float[Tensor, "row pos d"], hook: Any) -> Float[Tensor, "1 token d"]:
            return hidden[batch.reads][None]

        with self.bridge.hooks(fwd_hooks=[("unembed.hook_in", gather)]):
            out = self.hf(batch.tokens, attention_mask=batch.attention_mask, use_cache=False)
        return out.logits[0]

    def generate(
        self,
        prompts: Sequence[str],
        stems: Sequence[str] | None = None,
        *,
        max_new_tokens: int = 32,
        batch_size: int = 32,
    ) -> list[str]:
        """Greedy continuations of the rendered prompts, each followed by its stem (the answer's beginning).

        Batches are left-padded and sorted by length; texts come back in the order given, without special tokens.
        """
        pairs = zip(prompts, stems if stems is not None else [""] * len(prompts), strict=True)
        rows = [self.encode_cue(prompt, stem) for prompt, stem in pairs]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        texts = [""] * len(rows)
        with self.evaluating():
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                for i, text in zip(chosen, self._greedy([rows[i] for i in chosen], max_new_tokens), strict=True):
                    texts[i] = text
        return texts

    def _greedy(self, rows: list[list[int]], max_new_tokens: int) -> list[str]:
        width = max(map(len, rows))
        tokens = torch.tensor([[self.pad_token] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=self.end_token,
            pad_token_id=self.pad_token,
        )
        hf_model: Any = self.hf
        out = hf_model.generate(tokens, attention_mask=mask, generation_config=config)
        return self.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)

    def plain(self) -> PreTrainedModel:
        """A plain Hugging Face model with copies of the present weights."""
        write_back_fused(self.bridge)
        return plain_model(self.hf, self.weights)

    def copy(self) -> Model:
        """An independent model with the same weights, tokenizer, template and verified seam."""
        weights, bridge = _wrap(self.plain().to(self.device), self.tokenizer)  # type: ignore[arg-type]
        return Model(bridge, self.tokenizer, self.template, self.name, list(self.checks), self.verified_seam, weights)

    def save(self, directory: str | Path) -> None:
        """Write a plain Hugging Face model (safetensors) and tokenizer; `transformers` alone loads it again.

        The directory appears when everything is in it. Raises RunError if it cannot be written.
        """
        with new_directory(Path(directory)) as temporary, no_progress_bar():
            self.plain().save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)


def load_model(
    source: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    template: str = "bare",
    check: bool = True,
) -> Model:
    """Load a built-in name, hub id, Hugging Face directory or GGUF file, or take over a Hugging Face model.

    A model that is passed in is owned from then on: TransformerLens wraps it in place. Every model is checked
    (see `health`); one that fails is refused with the reason, unless `check` is False, which leaves the findings
    in `.checks`. Raises ModelError.
    """
    check_versions()
    if isinstance(source, PreTrainedModel):
        if tokenizer is None:
            raise ModelError("a model given as an object needs its tokenizer: load_model(model, tokenizer=...)")
        hf_model, name = source, source.config.name_or_path or type(source).__name__
    elif not isinstance(source, str | Path):
        raise ModelError(f"{type(source).__name__} is no model: give a name, a path or a Hugging Face model")
    else:
        hf_model, found = load_source(str(source), _dtype(dtype))
        tokenizer = tokenizer if tokenizer is not None else found
        name = str(source) if not Path(str(source)).is_dir() else Path(str(source)).name
    hf_model = hf_model.to(_device(device)).eval()  # type: ignore[arg-type]
    _check_tokenizer(hf_model, tokenizer)
    tokens = probe_tokens(hf_model.get_input_embeddings().weight.shape[0], hf_model.device)
    reference = reference_logits(hf_model, tokens)
    weights, bridge = _wrap(hf_model, tokenizer)
    checks, seam = check_model(bridge, tokens, reference)
    failed = [f"{c.name}: {c.detail}" for c in checks if not c.passed]
    if failed and check:
        raise ModelError(f'model "{name}" is refused: ' + "; ".join(failed))
    return Model(bridge, tokenizer, Template(template), name, checks, seam, weights)


def _wrap(hf_model: PreTrainedModel, tokenizer: Any) -> tuple[dict[str, Tensor], TransformerBridge]:
    weights = named_weights(hf_model)
    if not getattr(hf_model.config, "architectures", None):  # a model made from a config alone
        hf_model.config.architectures = [type(hf_model).__name__]
    try:
        bridge = TransformerBridge.boot_transformers(
            hf_model.config.name_or_path or type(hf_model).__name__,
            hf_model=hf_model,
            tokenizer=_own_tokenizer(tokenizer),
            device=str(hf_model.device),
            dtype=hf_model.dtype,
        )
    except (ValueError, KeyError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"TransformerLens cannot wrap {type(hf_model).__name__}: {error}") from error
    blocks = getattr(bridge, "blocks", [])
    without = [str(layer) for layer, block in enumerate(blocks) if not hasattr(block, "attn")]
    if without or not blocks:
        raise ModelError(f"{type(hf_model).__name__} has no attention to look at in layers {', '.join(without)}")
    return weights, bridge.eval()


def _own_tokenizer(tokenizer: Any) -> Any:
    """A copy for TransformerLens, which adds special tokens to the tokenizer it is given."""
    own = copy.deepcopy(tokenizer)
    # Without this it fetches a tokenizer that has a beginning-of-text token anew, by name.
    own.init_kwargs = {"name_or_path": "", **own.init_kwargs, "add_bos_token": True}
    return own


def _check_tokenizer(hf_model: Any, tokenizer: Any) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"the tokenizer is a {type(tokenizer).__name__}; a Hugging Face tokenizer is needed")
    rows = hf_model.get_input_embeddings().weight.shape[0]
    if token_count(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer does not fit the model: it has ids up to {token_count(tokenizer) - 1}, "
            f"the model knows {rows} tokens"
        )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    allowed = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in allowed:
        raise ModelError(f'dtype "{dtype}": allowed are {", ".join(allowed)}')
    return allowed[dtype]


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a device that is not there
        reason = str(error).splitlines()[0]
        raise ModelError(f'device "{device}": {reason}; use "cpu", "cuda" or "auto"') from None
