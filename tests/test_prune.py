"""Cutting is exact where it can be, and what comes out is an ordinary Hugging Face checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FAMILIES, build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftlab import checkpoint
from draftlab.errors import UserError
from draftlab.prune.cut import Keep, choose, cut, keep_all
from draftlab.prune.importance import Importance, calibrate
from draftlab.prune.run import prune
from draftlab.shape import resolve

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def text(tmp_path) -> str:
    lines = "\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(120))
    (tmp_path / "text.txt").write_text(lines)
    return str(tmp_path / "text.txt")


def prune_to(source: Path, out: Path, text: str, **wanted: int) -> Path:
    have = checkpoint.read_shape(source)
    shape = resolve(have, multiple_of=8, **wanted)
    prune(
        source, shape, out=out, data=text, tokens=256, seq_len=64, seed=0, device=torch.device("cpu"),
        arguments={}, began=0.0, force=False,
    )  # fmt: skip
    return out


def logits(directory: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_checkpoint_loads_with_every_key_and_has_the_shape(family, family_dirs, tmp_path, text):
    kv_heads = checkpoint.read_shape(family_dirs[family]).kv_heads // 2
    out = prune_to(family_dirs[family], tmp_path / "out", text, layers=3, hidden=32, heads=4, kv_heads=kv_heads, ffn=40)
    shape = checkpoint.read_shape(out)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn) == (3, 32, 4, kv_heads, 40)
    assert torch.isfinite(logits(out)).all()
    before, after = json.loads((family_dirs[family] / "config.json").read_text()), checkpoint.read_config(out)
    assert after["model_type"] == before["model_type"]
    assert after["head_dim"] == 12
    assert len(after.get("layer_types", [0] * 3)) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_to_the_sources_own_shape_is_bit_identical(family, family_dirs, tmp_path, text):
    out = prune_to(family_dirs[family], tmp_path / "out", text)
    before, after = (load_file(d / "model.safetensors") for d in (family_dirs[family], out))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_silent_parts_changes_nothing(family, family_dirs, tmp_path, text):
    """Layers, heads and neurons whose output matrix is zero are the ones to go, and going they take nothing along."""
    model = build(family, seed=3)
    parameters = dict(model.named_parameters())
    silent_neurons, have = [0, 5, 6, 70, 71, 72, 80, 87], model.config
    group = have.num_attention_heads // have.num_key_value_heads
    silent_heads = list(range(8 // 2 * 12))  # the first half of the query heads, whole groups in every family
    with torch.no_grad():
        for layer in range(5):
            outputs = [p for n, p in parameters.items() if n.startswith(f"model.layers.{layer}.") and is_output(n)]
            parameters[f"model.layers.{layer}.mlp.down_proj.weight"][:, silent_neurons] = 0
            parameters[f"model.layers.{layer}.self_attn.o_proj.weight"][:, silent_heads] = 0
            for output in outputs if layer in (1, 3) else []:
                output.zero_()
    source = tmp_path / "source"
    model.save_pretrained(source)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((family_dirs["llama"] / file).read_bytes())
    out = prune_to(source, tmp_path / "out", text, layers=3, ffn=80, heads=4, kv_heads=4 // group)
    keep = Keep.model_validate_json((out / "keep.json").read_text())
    assert keep.layers == [0, 2, 4]
    assert not set(keep.ffn[0]) & set(silent_neurons)
    torch.testing.assert_close(logits(out), logits(source), atol=1e-4, rtol=1e-4)


def is_output(name: str) -> bool:
    return "o_proj" in name or "down_proj" in name


def test_cutting_twice_is_cutting_once(family_dirs):
    have = checkpoint.read_shape(family_dirs["qwen3"])
    weights = checkpoint.Weights(family_dirs["qwen3"])
    rng = np.random.default_rng(0)

    def random_keep(source, shape):
        def pick(n: int, k: int) -> list[int]:
            return sorted(rng.permutation(n)[:k].tolist())

        layers = pick(source.layers, shape.layers)
        kv = [pick(source.kv_heads, shape.kv_heads) for _ in layers]
        group = source.heads // source.kv_heads
        return Keep(
            layers=layers,
            hidden=pick(source.hidden, shape.hidden),
            kv_heads=kv,
            heads=[[k * group + g for k in row for g in range(group)] for row in kv],
            ffn=[pick(source.ffn, shape.ffn) for _ in layers],
        )

    middle = have.model_copy(update={"layers": 4, "hidden": 48, "heads": 6, "kv_heads": 3, "ffn": 60})
    small = have.model_copy(update={"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24})
    first, second = random_keep(have, middle), random_keep(middle, small)
    through = Keep(
        layers=[first.layers[i] for i in second.layers],
        hidden=[first.hidden[i] for i in second.hidden],
        heads=[[first.heads[i][h] for h in row] for i, row in zip(second.layers, second.heads, strict=True)],
        kv_heads=[[first.kv_heads[i][h] for h in row] for i, row in zip(second.layers, second.kv_heads, strict=True)],
        ffn=[[first.ffn[i][f] for f in row] for i, row in zip(second.layers, second.ffn, strict=True)],
    )
    twice = cut(cut(weights, middle, first, print), small, second, print)
    once = cut(weights, small, through, print)
    assert all(torch.equal(twice[name], once[name]) for name in once)


def test_heads_are_chosen_by_group():
    have = resolve_shape()
    heads = torch.zeros(2, 8)
    heads[0] = torch.tensor([1.0, 1, 9, 0, 0, 0, 4, 7])  # groups: 2, 9, 0, 11
    importance = Importance(layers=torch.ones(2), hidden=torch.arange(64.0), heads=heads, ffn=torch.ones(2, 88))
    shape = have.model_copy(update={"heads": 2, "kv_heads": 2, "hidden": 2})
    keep = choose(importance, have, shape)
    assert keep.kv_heads[0] == [1, 3]
    assert keep.heads[0] == [2, 7]
    assert keep.hidden == [62, 63]


def resolve_shape():
    from draftlab.shape import Shape

    return Shape(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=12, ffn=88, vocab=307)


def test_keep_all_keeps_everything():
    keep = keep_all(resolve_shape())
    assert (len(keep.layers), len(keep.hidden), len(keep.heads[1]), len(keep.kv_heads[1]), len(keep.ffn[1])) == (
        2,
        64,
        8,
        4,
        88,
    )


def test_a_layer_that_does_nothing_has_no_influence():
    model = build("llama", seed=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".2.self_attn.o_proj" in name or ".2.mlp.down_proj" in name:
                p.zero_()
    shape = resolve_shape().model_copy(update={"layers": 5})
    importance = calibrate(model, shape, [IDS.numpy()], print)
    assert importance.layers.argmin() == 2
    assert importance.layers[2].abs() < 1e-12
    assert (importance.heads[2] == 0).all()


def test_a_model_that_is_not_llama_like_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=32)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not LLaMA-like"):
        checkpoint.read_shape(tmp_path)
