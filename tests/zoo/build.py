"""A checkpoint of the zoo built small: random weights in its own structure, in the layout that it has on the hub."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import words
from .facts import Facts, Sizes

CONTEXT, LAYERS, SHRINK = 256, 4, 8
REACH, LEAST_WINDOW = 16, 16  # of windows: texts here are 16 times as short
PADDING = 16  # logits beyond the tokenizer's ids, where the real one has some
EXPERTS = 4
SHRUNK = (  # widths of heads and of their states, and tokens that states are computed for at once
    "head_dim",
    "query_pre_attn_scalar",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "mamba_d_ssm",
    "mamba_d_head",
    "mamba_d_state",
    "state_size",
    "chunk_size",
    "mamba_chunk_size",
)
# what config.json calls a size, where it is not what LLaMA calls it; "": it does not say
NAMES = {
    "gpt2": {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "kv": "",
        "ffn": "",
        "context": "n_positions",
    },
    "bloom": {"layers": "n_layer", "heads": "n_head", "kv": "", "ffn": "", "context": "seq_length"},
    "opt": {"kv": "", "ffn": "ffn_dim"},
    "gpt_neox": {"kv": ""},
    "falcon": {"kv": "", "ffn": ""},
    "mamba2": {"heads": "num_heads", "kv": "n_groups", "ffn": "", "context": ""},
}
LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv": "num_key_value_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab": "vocab_size",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def small(facts: Facts) -> Sizes:
    """Sizes with the ratios of the real ones: width to heads, heads to kv heads, ffn to width; odd heads stay odd."""
    s = facts.sizes
    kv = s.kv if s.kv % 2 or s.kv == 2 else 4 if s.kv == s.heads else 2
    heads, head = s.heads // s.kv * kv, s.head // SHRINK
    while heads * head * s.hidden % (8 * s.heads * s.head):
        kv, heads = 2 * kv, 2 * heads
    hidden = heads * head * s.hidden // (s.heads * s.head)
    known = words.size(facts.words)
    spare = PADDING if s.vocab > s.tokens else s.vocab - s.tokens
    pattern = max([len(v) for v in facts.config.values() if isinstance(v, list)], default=1)
    every = int(facts.config.get("sliding_window_pattern", pattern))
    return Sizes(
        layers=max(LAYERS, every),
        hidden=hidden,
        heads=heads,
        kv=kv,
        head=head,
        ffn=max(8, s.ffn * hidden // s.hidden // 8 * 8),
        vocab=known + spare,
        tokens=known,
        context=CONTEXT,
    )


def config(facts: Facts) -> dict[str, Any]:
    """config.json as on the hub, with the small sizes."""
    sizes, real, ids = small(facts), facts.sizes, words.special(facts.words)
    names = LLAMA | NAMES.get(facts.type, {})
    found: dict[str, Any] = {"model_type": facts.type, "architectures": [facts.architecture]}
    found |= {name: getattr(sizes, size) for size, name in names.items() if name}
    found |= {"torch_dtype": facts.dtype, "transformers_version": "4.44.0", "use_cache": True}
    found |= {
        "bos_token_id": ids["end0"] if facts.bos == facts.eos else ids["bos"],
        "eos_token_id": _ends(facts)[0],
    }
    if facts.type not in NAMES:
        found |= {"hidden_act": "silu"}
    for key, value in facts.config.items():
        found[key] = _shrunk(key, value, facts, sizes)
    if "pad_token_id" in facts.config:
        found["pad_token_id"] = ids["pad"]
    assert real.heads * real.head * sizes.hidden == real.hidden * sizes.heads * sizes.head
    return {key: value for key, value in found.items() if key not in facts.omit}


def build(facts: Facts, out: Path) -> Path:
    """Write the checkpoint into out; the same one for the same facts."""
    out.mkdir(parents=True)
    words.write(facts.words, out, chat=facts.chat)
    (out / "config.json").write_text(json.dumps(config(facts), indent=2))
    settings = {"_from_model_config": True, "eos_token_id": _ends(facts)[1] or _ends(facts)[0]}
    (out / "generation_config.json").write_text(json.dumps(settings))
    _write(facts, out, weights(facts, out))
    return out


def weights(facts: Facts, out: Path) -> dict[str, Tensor]:
    """Random weights of the model that out's config.json describes, by the names that they have in its files."""
    model = _model(out, facts)
    model.save_pretrained(out / "work")
    tensors: dict[str, Tensor] = {}
    for file in sorted((out / "work").iterdir()):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        file.unlink()
    (out / "work").rmdir()
    base = model.base_model_prefix + "."
    if "tied_head" in facts.files:
        tensors["lm_head.weight"] = tensors[base + "embed_tokens.weight"].clone()
    if "bare" in facts.files:
        tensors = {name.removeprefix(base): tensor for name, tensor in tensors.items()}
    return tensors | dict(_buffers(facts))


def _model(directory: Path, facts: Facts) -> PreTrainedModel:
    """Norms and biases matter in it too, and its logits are wide enough to have clear winners."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.08))
    return model.to(DTYPES[facts.dtype])


def _buffers(facts: Facts) -> dict[str, Tensor]:
    """Return the buffers that older versions of transformers wrote."""
    sizes, found = small(facts), {}
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
    for i in range(sizes.layers):
        frequencies = 10000.0 ** -(torch.arange(0, sizes.head, 2) / sizes.head)
        if facts.type == "gpt2":
            found[f"h.{i}.attn.bias"] = mask.float()
        elif facts.type == "gpt_neox":
            attention = f"gpt_neox.layers.{i}.attention"
            found[f"{attention}.bias"], found[f"{attention}.masked_bias"] = (
                mask.clone(),
                torch.tensor(-1e9),
            )
            found[f"{attention}.rotary_emb.inv_freq"] = frequencies[: max(1, sizes.head // 8)]
        elif "inv_freq" in facts.files:
            found[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = frequencies
    return found if {"inv_freq", "masks"} & set(facts.files) else {}


def _write(facts: Facts, out: Path, tensors: dict[str, Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    kind = "bin" if "bin" in facts.files else "safetensors"
    stem = "pytorch_model" if kind == "bin" else "model"
    parts = {f"{stem}.{kind}": tensors}
    if "sharded" in facts.files:
        names, half = sorted(tensors), len(tensors) // 2
        parts = {
            f"{stem}-0000{i}-of-00002.{kind}": {n: tensors[n] for n in shard}
            for i, shard in enumerate((names[:half], names[half:]), 1)
        }
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}}
        index["weight_map"] = {name: file for file, part in parts.items() for name in part}  # type: ignore[assignment]
        (out / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        if kind == "bin":
            torch.save(part, out / file)
        else:
            save_file(part, out / file, metadata={"format": "pt"})
    theirs = {name.removeprefix("model.").replace("self_attn.q_proj", "attention.wq"): t for name, t in tensors.items()}
    if "consolidated" in facts.files:
        save_file(theirs, out / "consolidated.safetensors")
        (out / "params.json").write_text(json.dumps({"dim": small(facts).hidden, "n_layers": small(facts).layers}))
    if "original" in facts.files:
        (out / "original").mkdir()
        torch.save(theirs, out / "original/consolidated.00.pth")
        (out / "original/params.json").write_text("{}")


def _ends(facts: Facts) -> tuple[int | list[int], list[int]]:
    """Return small ids for those of config.json, and for those of generation_config.json."""
    ids = words.special(facts.words)
    real = facts.eos if isinstance(facts.eos, list) else [facts.eos]
    named = {end: ids[f"end{i}"] for i, end in enumerate(dict.fromkeys([*real, *facts.stops]))}
    ends = [named[end] for end in real]
    return ends if isinstance(facts.eos, list) else ends[0], [named[end] for end in facts.stops]


def _shrunk(key: str, value: Any, facts: Facts, sizes: Sizes) -> Any:
    """Return a value of the real config.json as the small one has it."""
    real = facts.sizes
    if isinstance(value, dict):
        return {k: _shrunk(k, v, facts, sizes) for k, v in value.items()}
    if isinstance(value, list) and value:
        return (value * sizes.layers)[: sizes.layers]
    if value is None or isinstance(value, (bool, str, list)):
        return value
    if key == "sliding_window":
        return max(LEAST_WINDOW, value // REACH)
    if key in ("original_max_position_embeddings", "n_ctx"):
        return max(LEAST_WINDOW, value * CONTEXT // real.context)
    if key in SHRUNK:
        return value // SHRINK
    if key == "word_embed_proj_dim":
        return sizes.hidden
    if key == "max_window_layers":
        return sizes.layers * value // real.layers
    if key in ("num_local_experts", "num_experts"):
        return EXPERTS
    if key == "num_experts_per_tok":
        return min(2, value)
    if key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        return max(8, value * sizes.hidden // real.hidden // 8 * 8)
    return value
