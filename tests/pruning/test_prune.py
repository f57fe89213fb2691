"""Cutting is exact where it can be, and what comes out is an ordinary Hugging Face checkpoint."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import (
    FAMILIES,
    PASS_ROUNDING,
    assert_rounds,
    build,
    logits_by_transformers,
    rounding,
)
from helpers.errors import raises_option
from helpers.small_files import copy_tokenizer, write_functions, write_prompts
from safetensors.torch import load_file

from draftlab.commands import OUTPUTS_BUILD, PRUNE
from draftlab.commands.prune import prepare
from draftlab.commands.settings.prune import PruneConfig
from draftlab.model import checkpoint, devices, llama, saving
from draftlab.model.shape import Shape, resolve, write_shape_file
from draftlab.output import Output
from draftlab.pruning import choose as choosing
from draftlab.pruning import run
from draftlab.pruning.choose import choose
from draftlab.pruning.cut import Keep
from draftlab.pruning.importance import Scores, calibrate
from draftlab.pruning.run import KEEP_FILE, joined
from draftlab.pruning.source import check_prunable
from draftlab.pruning.walk import Walk
from draftlab.runs import provenance

CPU = torch.device("cpu")
PLAIN = {"refit": "none"}
IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def text(tmp_path) -> str:
    return write_functions(tmp_path / "text.txt", 120, 8)


SMALL = Shape(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=12, ffn=88, vocab=307)


def prune_to(
    source: Path,
    out: Path,
    text: str,
    shape: Shape | None = None,
    *,
    rotate: bool = False,
    **settings: Any,
) -> run.PrunedDraft:
    """Cut to a shape, the source's own if left out, by coordinates."""
    defaults = {"calibration_tokens": 256, "seq_len": 64, "device": "cpu"}
    file = out.with_suffix(".yaml")
    asked = (shape or checkpoint.read_shape(source)).with_whole_head()
    tied = asked.tied and not settings.get("untie")
    write_shape_file(asked.model_copy(update={"tied": tied}), file, "for a test")
    given = {"source": str(source), "data": text, "out": out, "shape": file}
    config = PruneConfig.build(given | defaults | settings)
    job = prepare(config, True)
    assert job.method != "masks"
    cut = job.cut(Output(command="prune", config=config, out=out))
    return cut.by_scores(job.method, job.depth, scores_cache=job.scores_cache, rotate=rotate)


def cut_to(source: Path, out: Path, text: str, **wanted: int) -> Path:
    """Cut alone: nothing is rescaled or refitted."""
    heads = {name: wanted.pop(name) for name in ("heads", "kv_heads") if name in wanted}
    shape = resolve(checkpoint.read_shape(source), multiple_of=8, **wanted).model_copy(update=heads)
    prune_to(source, out, text, shape, **PLAIN)
    return out


logits = partial(logits_by_transformers, ids=IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_to_the_sources_own_shape_is_bit_identical(family, family_dirs, tmp_path, text):
    out = cut_to(family_dirs[family], tmp_path / "out", text)
    before, after = (load_file(d / "model.safetensors") for d in (family_dirs[family], out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_silent_parts_changes_nothing(family, family_dirs, tmp_path, text):
    """Layers, heads and neurons whose output matrix is zero are the ones to go, and going they take nothing along."""
    model = build(family, seed=3)
    silent_neurons, have = [0, 5, 6, 70, 71, 72, 80, 87], model.config
    group = have.num_attention_heads // have.num_key_value_heads
    silent_heads = list(range(8 // 2 * 12))  # half of the query heads, whole groups in every family
    with torch.no_grad():
        for name, output in model.named_parameters():
            silent = silent_neurons if "down_proj" in name else silent_heads
            if "o_proj" in name or "down_proj" in name:
                if name.split(".")[2] in "13":
                    output.zero_()
                elif name.endswith("weight"):
                    output[:, silent] = 0
    source = tmp_path / "source"
    model.save_pretrained(source)
    copy_tokenizer(family_dirs["llama"], source)
    out = cut_to(source, tmp_path / "out", text, layers=3, ffn=80, heads=4, kv_heads=4 // group)
    keep = Keep.model_validate_json((out / "keep.json").read_text())
    assert keep.layers == [0, 2, 4]
    assert not set(keep.ffn[0]) & set(silent_neurons)
    assert_rounds(logits(out), logits(source))


def test_heads_are_chosen_by_group():
    heads = torch.zeros(2, 8)
    heads[0] = torch.tensor([1.0, 1, 9, 0, 0, 0, 4, 7])  # groups: 2, 9, 0, 11
    axes = {"layers": torch.ones(2), "hidden": torch.arange(64.0), "ffn": torch.ones(2, 88)}
    shape = SMALL.model_copy(update={"heads": 2, "kv_heads": 2, "hidden": 2})
    keep = choose(Scores(**axes, heads=heads), SMALL, shape, [0, 1])
    assert (keep.kv_heads[0], keep.heads[0], keep.hidden) == ([1, 3], [2, 7], [62, 63])


def test_a_layer_that_does_nothing_has_no_influence():
    model = build("llama", seed=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".2.self_attn.o_proj" in name or ".2.mlp.down_proj" in name:
                p.zero_()
    shape = SMALL.model_copy(update={"layers": 5})
    walk = Walk(dict(model.state_dict()), model.config.to_dict(), torch.float32, CPU)
    importance = calibrate(walk, shape, [IDS[:1]], print).importance
    assert importance.layers.argmin() == 2
    assert importance.layers[2].abs() < PASS_ROUNDING
    assert (importance.heads[2] == 0).all()


@pytest.mark.parametrize(
    ("family", "untie"),
    [("llama_biases", False), ("qwen3", False), ("llama3_tied", False), ("qwen2_tied", True)],
)
def test_a_rotated_and_refitted_draft_is_one_model_in_the_engine_and_in_transformers(
    family, untie, family_dirs, tmp_path, text
):
    source, out = family_dirs[family], tmp_path / "out"
    have = checkpoint.read_shape(source)
    shape = resolve(have, layers=3, hidden=48, ffn=40)
    tied = have.tied and not untie
    refit = "layers" if tied else "head"
    outcome = prune_to(source, out, text, shape, rotate=True, untie=untie, refit=refit)
    assert checkpoint.read_shape(out) == shape.model_copy(update={"tied": tied})
    assert outcome.agreement is not None
    engine = llama.load(out, torch.float32)
    found = engine.forward(IDS, engine.new_cache(*IDS.shape))
    assert_rounds(found, logits(out))


def test_the_same_command_gives_the_same_bytes_and_a_cache_of_scores_changes_nothing(family_dirs, tmp_path, text):
    source = family_dirs["llama"]
    shape = resolve(checkpoint.read_shape(source), layers=2, hidden=32, ffn=40)
    shape = shape.model_copy(update={"heads": 4, "kv_heads": 2})
    cache = tmp_path / "scores.safetensors"
    for name, kept in (("a", None), ("b", cache), ("c", cache)):
        prune_to(source, tmp_path / name, text, shape, rotate=True, scores_cache=kept)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b == c
    with raises_option("seed"):
        prune_to(source, tmp_path / "d", text, shape, scores_cache=cache, seed=1)


def test_a_draft_is_calibrated_on_what_the_target_wrote(family_dirs, tmp_path, text):
    prompts, store = write_prompts(tmp_path / "prompts.jsonl", 20), tmp_path / "store"
    source = str(family_dirs["llama"])
    few = {"source": source, "layers": 2, "seq_len": 16, "calibration_tokens": 64}
    OUTPUTS_BUILD(target=source, prompt_file=prompts, max_new_tokens=24, out=store)
    PRUNE(outputs=store, out=tmp_path / "draft", **few)
    assert {*provenance.read_record(tmp_path / "draft").inputs} == {source, str(store)}
    PRUNE(data=text, out=tmp_path / "other", **few)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("draft", "other")]
    assert weights[0] != weights[1]
    chunks = joined([np.arange(40), np.arange(40, 80)], 3, 16, seed=0)
    assert [tuple(chunk.shape) for chunk in chunks] == [(1, 16)] * 3
    assert chunks[0][0].tolist() in (list(range(16)), list(range(40, 56)))
    assert joined([np.array([1, 2])], 4, 5, seed=0)[0].tolist() == [[1, 2, 1, 2, 1]]
    with raises_option("--data"):
        PRUNE(outputs=store, data=str(prompts), out=tmp_path / "both", **few)


@pytest.mark.gpu
def test_a_gpu_keeps_what_the_cpu_keeps(family_dirs, tmp_path, text):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    source, kept = family_dirs["llama"], {}
    shape = resolve(checkpoint.read_shape(source), layers=2, hidden=32, ffn=40)
    shape = shape.model_copy(update={"heads": 4, "kv_heads": 2})
    for name in ("cpu", "cuda"):
        prune_to(source, tmp_path / name, text, shape, device=name, **PLAIN)
        kept[name] = (tmp_path / name / KEEP_FILE).read_text()
    assert kept["cpu"] == kept["cuda"]


def test_a_tied_head_is_neither_rotated_nor_refitted_alone(family_dirs, tmp_path, text):
    source = family_dirs["qwen2_tied"]
    with raises_option("--refit"):
        prune_to(source, tmp_path / "out", text, refit="head")
    with raises_option("--untie"):
        prune_to(family_dirs["llama"], tmp_path / "out", text, untie=True)


def test_layers_by_depth_rule():
    turned = torch.tensor([0.5, 0.1, 0.4, 0.3, 0.05, 0.2])
    assert choosing.influential(turned, 4) == [0, 2, 3, 5]
    assert choosing.influential(turned, 1) == [0]
    for layers in itertools.permutations(turned.tolist()):
        chosen = choosing.influential(torch.tensor(layers), 4)
        for seen in range(1, 7):
            first = choosing.influential(torch.tensor(layers[:seen]), 4)
            assert {layer for layer in chosen if layer < seen} <= {*first}
    assert choosing.even(6, 3) == [0, 2, 5]


def test_baselines_rank_by_their_own_rule(family_dirs):
    have = checkpoint.read_shape(family_dirs["llama"])
    assert choosing.top(choosing.first_scores(have).hidden, 3) == [0, 1, 2]
    first, again, other = (choosing.random_scores(have, seed).ffn for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# of 3 and 1 to a KV head
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 8)])
def test_any_number_of_heads_to_a_kv_head_can_be_tried(family_dirs, heads, kv_heads):
    have = checkpoint.read_shape(family_dirs["llama"])
    shape = have.model_copy(update={"heads": heads, "kv_heads": kv_heads})
    check_prunable(checkpoint.read_config(family_dirs["llama"]), shape)


@pytest.fixture
def halves(family_dirs, tmp_path) -> dict[str, Path]:
    """Return one checkpoint in float16, and the same numbers in float32."""
    made = {"float16": tmp_path / "float16", "float32": tmp_path / "float32"}
    source = family_dirs["llama"]
    weights = {name: tensor.half() for name, tensor in checkpoint.Weights(source).items()}
    for dtype, place in made.items():
        place.mkdir()
        stored = ((name, tensor.to(devices.DTYPES[dtype])) for name, tensor in weights.items())
        saving.write_checkpoint(place, checkpoint.read_config(source), stored, source)
    return made


def test_a_float16_source_is_cut_as_the_same_numbers_in_float32(halves, text, tmp_path, capsys):
    outs = {name: tmp_path / f"{name}-out" for name in halves}
    for name, source in halves.items():
        shape = resolve(checkpoint.read_shape(source), layers=3, hidden=32, multiple_of=8)
        # enough text that rounding does not decide whether a fit is taken
        prune_to(source, outs[name], text, shape, rotate=True, calibration_tokens=4096)
    assert capsys.readouterr().err.count("is stored in float16") == 1
    exact, rounded = (checkpoint.Weights(outs[name]) for name in ("float32", "float16"))
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.float16)
    step = 2**-8
    if not devices.is_fast(torch.bfloat16, CPU):
        step = 2**-11
        for name, wanted in exact.items():
            # fits make up for the rounding of earlier weights, so their weights may differ by more
            if not name.endswith(("o_proj.weight", "down_proj.weight")):
                allowed = rounding(torch.float16, wanted.shape[-1], float(wanted.abs().max()))
                assert float((rounded[name].float() - wanted).abs().max()) <= allowed, name
    # passes in 8 bits may decide between parts that matter alike: the draft agrees as well
    records = [provenance.read_record(place) for place in outs.values()]
    agreements = [record.notes["agreement"] for record in records if record is not None]
    assert agreements[0]["acceptance"] == pytest.approx(agreements[1]["acceptance"], abs=8 * step)
