"""An EAGLE-3 head written from the published description, token by token; it reads the files by itself."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.layout import Head
from draftlab.model import checkpoint, llama
from helpers.builders import build

VARIANTS: dict[str, dict[str, Any]] = {  # of a head
    "plain": {},
    "residual": {"norm_before_residual": True},
    "speculators": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "sliding_window": 3,
    },
    "fc_norm": {"fc_norm": True, "qk_norm": True, "sliding_window": 4},
}
DRAWN = (
    "fc",
    "layers.0.input_layernorm",
    "layers.0.hidden_norm",
    "layers.0.self_attn.q_proj",
    "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj",
    "layers.0.self_attn.o_proj",
    "layers.0.post_attention_layernorm",
    "layers.0.mlp.gate_proj",
    "layers.0.mlp.up_proj",
    "layers.0.mlp.down_proj",
    "norm",
    "lm_head",
)  # order in which the weights are drawn, whatever the order of sizes()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn each pair (i, i + C / 2) of a head [C] by its angle."""
    half, out = len(x) // 2, torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i], out[i + half] = (
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        )
    return out


@dataclass
class PlainHead:
    """A head on [T, A E] states of a target, in the order of the description.

    sizes: Fields of a LlamaConfig. weights: The layer's names without their prefix. The norms before fc and of queries
    and keys are there if their weights are. residual: norm_before_residual.
    """

    sizes: dict[str, Any]
    weights: dict[str, Tensor]
    ids: Tensor
    embedding: Tensor
    residual: bool
    norm_output: bool = False
    window: int | None = None

    @classmethod
    def of(cls, folder: Path, embedding: Tensor) -> "PlainHead":
        config = json.loads((folder / "config.json").read_text())
        weights = {name: w.to(embedding) for name, w in load_file(folder / "model.safetensors").items()}
        ids = torch.arange(config["draft_vocab_size"]) + weights.pop("d2t").long()
        known = weights.pop("t2d").bool()
        assert known.nonzero().squeeze(1).tolist() == sorted(ids.tolist())
        plain = {name.removeprefix("midlayer.").removeprefix("layers.0."): w for name, w in weights.items()}
        sizes = config.get("transformer_layer_config", config)
        window = sizes["sliding_window"] if sizes.get("layer_types") == ["sliding_attention"] else None
        own = plain.pop("embed_tokens.weight", embedding)
        return cls(
            sizes,
            plain,
            ids,
            own,
            config["norm_before_residual"],
            config.get("norm_output", False),
            window,
        )

    def chain(self, text: list[int], states: Tensor, start: int, steps: int) -> list[Tensor]:
        """Logits [W] of each step of the chain that begins at position start; text is given in all steps.

        states: the target's, [T, A E].
        """
        w, logits = self.weights, []
        own = states.new_empty(0)
        first = torch.stack([w["fc.weight"] @ self.read(state) for state in states])
        inputs = [(text[i + 1], first[i], i) for i in range(start + 1)]
        for step in range(steps):
            if step:
                inputs.append((text[start + 1 + step], own, start + step))
            own = self.layer(inputs)
            normed = rms(own, w["norm.weight"], self.sizes["rms_norm_eps"])
            logits.append(w["lm_head.weight"] @ normed)
            own = normed if self.norm_output else own
        return logits

    def read(self, state: Tensor) -> Tensor:
        """Return the target's states of a token that fc reads, [A E]."""
        w, eps = self.weights, self.sizes["rms_norm_eps"]
        if "input_norm.weight" in w:
            return rms(state, w["input_norm.weight"], eps)
        if "fc_norm.0.weight" in w:
            size = len(w["fc_norm.0.weight"])
            parts = [state[i : i + size] for i in range(0, len(state), size)]
            return torch.cat([rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)])
        return state

    def layer(self, inputs: list[tuple[int, Tensor, int]]) -> Tensor:
        """Output [D] of the last input, which attends to all."""
        w, s = self.weights, self.sizes
        heads, kv_heads, c = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
        keys, values, eps = [], [], s["rms_norm_eps"]
        theta = s["rope_parameters"]["rope_theta"]
        x = normed = state = torch.empty(0)
        position = 0
        for token, state, position in inputs:
            normed = rms(state, w["hidden_norm.weight"], eps)
            x = torch.cat([rms(self.embedding[token], w["input_layernorm.weight"], eps), normed])
            k = self.of_head("k", (w["self_attn.k_proj.weight"] @ x).reshape(kv_heads, c))
            keys.append(torch.stack([rotated(head, position, theta) for head in k]))
            values.append((w["self_attn.v_proj.weight"] @ x).reshape(kv_heads, c))
        q = self.of_head("q", (w["self_attn.q_proj.weight"] @ x).reshape(heads, c))
        out, latest = [], -self.window if self.window else 0
        keys, values = keys[latest:], values[latest:]
        for h in range(heads):
            g = h * kv_heads // heads
            turned = rotated(q[h], position, theta)
            scores = torch.stack([turned @ key[g] for key in keys]) / math.sqrt(c)
            out.append(sum(p * value[g] for p, value in zip(torch.softmax(scores, 0), values, strict=True)))
        x = (normed if self.residual else state) + w["self_attn.o_proj.weight"] @ torch.cat(out)
        normed = rms(x, w["post_attention_layernorm.weight"], eps)
        gate = w["mlp.gate_proj.weight"] @ normed
        return x + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ normed))

    def of_head(self, name: str, rows: Tensor) -> Tensor:
        """Queries or keys [H, C], with their norm if there is one."""
        weight = self.weights.get(f"self_attn.{name}_norm.weight")
        return rows if weight is None else torch.stack([rms(r, weight, self.sizes["rms_norm_eps"]) for r in rows])


def target_and_head(folder: Path, device: torch.device = checkpoint.CPU) -> tuple[llama.Llama, EagleLlama]:
    """Return a target whose last token decides nearly alone, written to folder, and a head that half knows its ways."""
    model: Any = build("llama", 1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
                matrix.weight.mul_(0.1)
        model.get_output_embeddings().get_parameter("weight").mul_(12)
    model.save_pretrained(folder)
    target = llama.load(folder, torch.float32, device)
    config = layout.head_config(folder, None, 307)
    sizes = config.sizes()
    weights = {f"{name}.weight": 0.02 * torch.randn(sizes[f"{name}.weight"], generator=generator) for name in DRAWN}
    weights["lm_head.weight"] = target.head.cpu().clone()
    for name in (
        "norm",
        "layers.0.input_layernorm",
        "layers.0.hidden_norm",
        "layers.0.post_attention_layernorm",
    ):
        weights[f"{name}.weight"] = torch.ones(64)
    size, width = config.head_dim, config.kv_heads * config.head_dim
    value, key = (torch.linalg.qr(torch.randn(64, n, generator=generator)).Q.T for n in (width, size))
    weights["layers.0.self_attn.v_proj.weight"][:, :64] = 3 * value
    shared = value.T.unflatten(1, (-1, size)).repeat_interleave(config.heads // config.kv_heads, 1)
    weights["layers.0.self_attn.o_proj.weight"] += shared.flatten(1)
    # attends to its own token
    weights["layers.0.self_attn.q_proj.weight"][:, :64] += 2 * key.repeat(config.heads, 1)
    weights["layers.0.self_attn.k_proj.weight"][:, :64] += 2 * key.repeat(config.kv_heads, 1)
    weights = {name: weight.to(device) for name, weight in weights.items()}
    head = Head(config=config, weights=weights, ids=torch.arange(307), embedding=None)
    return target, EagleLlama(head, target.embed, folder)
