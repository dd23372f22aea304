"""Tiny random models of every supported architecture, and a tokenizer for them; the same every time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from asu_interp.models import Model, load_model
from asu_interp.models.weights import fused_projections

VOCAB, CONTEXT, D_MODEL, N_HEADS, N_KV, D_HEAD, WINDOW = 120, 128, 32, 4, 2, 8, 4
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# The names that most configurations share.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": D_MODEL,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": N_HEADS,
    "max_position_embeddings": CONTEXT,
    **ENDS,
}
GROUPED = {**COMMON, "num_key_value_heads": N_KV}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

PROJECTIONS = ("q_proj", "k_proj", "query_key_value", "Wqkv", "c_attn", "qkv_proj")


def _seeded(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this config with weights of order one: peaked attention, and logits that depend on it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = hf.AutoModelForCausalLM.from_config(config).eval()
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:  # biases, norms and learned sinks, around what they start at
            parameter.data += (1.0 if "sinks" in name else 0.1) * noise
            if "q_norm" in name or "k_norm" in name:
                parameter.data += 0.5
        elif parameter.numel() == VOCAB * D_MODEL or "wpe" in name or "embed_positions" in name:
            parameter.data = 0.3 * noise
        else:
            gain = 1.5 if any(part in name for part in PROJECTIONS) else 1.0
            parameter.data = gain * D_MODEL**-0.5 * noise
    return model


def _gpt2() -> PreTrainedConfig:
    return hf.GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=D_MODEL, n_layer=3, n_head=N_HEADS, **ENDS)


def _gptj() -> PreTrainedConfig:
    return hf.GPTJConfig(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=D_MODEL, n_layer=2, n_head=N_HEADS, rotary_dim=4, **ENDS
    )


def _gpt_neo() -> PreTrainedConfig:
    return hf.GPTNeoConfig(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        hidden_size=D_MODEL,
        num_layers=2,
        num_heads=N_HEADS,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        **ENDS,
    )


def _opt() -> PreTrainedConfig:
    sizes = {key: value for key, value in COMMON.items() if key != "intermediate_size"}
    return hf.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=D_MODEL)


def _bloom() -> PreTrainedConfig:
    return hf.BloomConfig(vocab_size=VOCAB, hidden_size=D_MODEL, n_layer=2, n_head=N_HEADS, **ENDS)


def _mpt() -> PreTrainedConfig:
    return hf.MptConfig(vocab_size=VOCAB, d_model=D_MODEL, n_layers=2, n_heads=N_HEADS, max_seq_len=CONTEXT, **ENDS)


def _gemma2() -> PreTrainedConfig:
    return hf.Gemma2Config(
        **(GROUPED | {"num_hidden_layers": 3}),
        head_dim=D_HEAD,
        query_pre_attn_scalar=D_HEAD,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=10.0,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
    )


def _gemma3() -> PreTrainedConfig:
    return hf.Gemma3TextConfig(
        **(GROUPED | {"num_hidden_layers": 3}),
        head_dim=D_HEAD,
        query_pre_attn_scalar=D_HEAD,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
    )


def _gpt_oss() -> PreTrainedConfig:
    return hf.GptOssConfig(
        **(GROUPED | {"num_hidden_layers": 3}),
        head_dim=D_HEAD,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
    )


def _falcon() -> PreTrainedConfig:
    """One key/value head for all query heads, attention beside the MLP: the 7B model's layout."""
    sizes = {key: value for key, value in COMMON.items() if key != "intermediate_size"}
    return hf.FalconConfig(**sizes, multi_query=True, parallel_attn=True, bias=False, alibi=False)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": _gpt2,
    "gpt-neox": lambda: hf.GPTNeoXConfig(**COMMON),
    "gpt-j": _gptj,
    "gpt-neo": _gpt_neo,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "llama": lambda: hf.LlamaConfig(**(GROUPED | {"num_hidden_layers": 3})),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=D_HEAD),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi": lambda: hf.PhiConfig(**COMMON),
    "phi3": lambda: hf.Phi3Config(**GROUPED),
    "olmo2": lambda: hf.Olmo2Config(**GROUPED),
    "smollm3": lambda: hf.SmolLM3Config(**(GROUPED | {"num_hidden_layers": 3}), no_rope_layers=[1, 0, 1]),
    "stablelm": lambda: hf.StableLmConfig(**GROUPED),
    "starcoder2": lambda: hf.Starcoder2Config(**GROUPED),
    "gpt-oss": _gpt_oss,
}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    name: (lambda config=config: _seeded(config())) for name, config in CONFIGS.items()
}


@cache
def tiny_tokenizer(vocab_size: int = VOCAB - 4) -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer over printable ASCII, with a few merges; the end token (id 0) also pads.

    Smaller than the models: Qwen 2's tokenizer class adds a token of its own when one is loaded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ascii_alphabet = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<end>"],
        initial_alphabet=ascii_alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["The capital of the island is on the coast in the north and was"] * 4, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def load_family(name: str) -> Model:
    """A fresh tiny model of the family, wrapped and checked."""
    return load_model(FAMILIES[name](), tokenizer=tiny_tokenizer())


def seam_table() -> str:
    """Markdown table of the families: where attention takes a temperature, and what TransformerLens splits."""
    rows = [
        "| family | temperature seam | fused weights split for hooks | query / key-value heads |",
        "|---|---|---|---|",
    ]
    for name in FAMILIES:
        model = load_family(name)
        fused = sorted({_fused_name(part) for part, *_ in fused_projections(model.bridge)})
        key_value = getattr(model.bridge.cfg, "n_key_value_heads", None) or model.n_heads
        rows.append(f"| {name} | {model.seam.value} | {', '.join(fused) or '-'} | {model.n_heads} / {key_value} |")
    return "\n".join(rows)


def _fused_name(component: object) -> str:
    return "gate/up" if hasattr(component, "split_gate_up_matrix") else "q/k/v"


if __name__ == "__main__":
    print("# Families and temperature seams\n")
    print("Made by `make seams` on tiny random models of each family, with the check that `load_model` makes:")
    print("`scores` divides the full pre-softmax logits, `query` the query before the product with the keys.\n")
    print(seam_table())
