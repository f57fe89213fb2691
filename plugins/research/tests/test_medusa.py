"""Medusa heads read and learn from the right states, and do not change the text of the target."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import PartialState
from helpers.builders import PASS_ROUNDING, build, recording, training_killed_at
from helpers.second_device import DEVICE, SecondDevice, without_second_device
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear, silu

from draftlab.commands import COMMANDS
from draftlab.data import Batch
from draftlab.engine.generate import decode, output_tokens, speculative_decode
from draftlab.errors import UserError
from draftlab.model import checkpoint, llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.native_cpu import NativeLlama
from draftlab.sampling import SamplingParams
from draftlab.training.teachers import LocalTeacher
from draftlab_research import medusa_training
from draftlab_research.drafting import medusa
from draftlab_research.drafting.medusa import MedusaDrafter
from draftlab_research.export_medusa import EXPORT_MEDUSA
from draftlab_research.medusa import MANIFEST
from draftlab_research.medusa_training import FrozenTarget, Heads, RepeatedBatch, SelfTeacher

PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]
HIDDEN, HEADS = 64, 3


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path]) -> llama.Llama:
    return llama.load(family_dirs["llama"], torch.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" for i in range(300)))
    return file


def random_heads(seed: int = 0) -> torch.Tensor:
    return torch.randn(HEADS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_of_zero_repeat_the_token_that_the_target_chose_last(target, k, rows):
    """A head with zero weights predicts the text's last token. States at other positions would give other tokens."""
    drafter = recording(MedusaDrafter, target, torch.zeros(HEADS, HIDDEN, HIDDEN))
    sampling = SamplingParams(max_tokens=24)
    found = output_tokens(speculative_decode(target, drafter, PROMPTS[:rows], k, sampling))
    assert found == output_tokens(decode(target, PROMPTS[:rows], sampling))
    ends = [p + f for p, f in zip(PROMPTS, found, strict=False)]
    for texts, draft in drafter.seen:
        going = [row for row, one in enumerate(texts) if len(one) < len(ends[row])]
        assert all(draft.ids[row].tolist() == [texts[row][-1]] * draft.ids.shape[1] for row in going)


def test_the_engine_drafts_what_the_heads_say_of_transformers_states(family_dirs, target):
    drafter = recording(MedusaDrafter, target, random_heads())
    output_tokens(speculative_decode(target, drafter, PROMPTS, HEADS, SamplingParams(max_tokens=16)))
    trunk = FrozenTarget(build("llama"))
    head = cast(Any, trunk.model.get_output_embeddings())
    for texts, draft in drafter.seen[:4]:
        for row, one in enumerate(texts):
            state = trunk(torch.tensor([one]))[0, -2]
            wanted = [head(torch.nn.functional.silu(w @ state) + state).argmax().item() for w in random_heads()]
            assert draft.ids[row].tolist() == wanted[: draft.ids.shape[1]]


def test_a_head_is_taught_what_the_target_says_of_the_token_that_it_predicts():
    ids = np.random.default_rng(0).integers(3, 300, (2, 13))
    trunk = FrozenTarget(build("llama"))
    student = Heads(trunk, HEADS)
    spread = RepeatedBatch.of(Batch(ids, np.ones((2, 12), np.float32)), HEADS)
    assert spread.mask.reshape(2, HEADS, 12).sum(2).tolist() == [[11, 10, 9]] * 2
    found = SelfTeacher(trunk, HEADS).distributions(spread)
    wanted = LocalTeacher(build("llama"), 307, torch.device("cpu")).distributions(spread)
    torch.testing.assert_close(found.hidden, wanted.hidden)
    states = student.states(torch.from_numpy(spread.ids[:, :-1]))
    own = trunk(torch.from_numpy(ids[:, :-1]))
    for k in range(1, HEADS + 1):  # zero heads: the target's states, shifted by k positions
        torch.testing.assert_close(states[k - 1 :: HEADS][:, k:], own[:, :-k])


def words(family_dirs: dict[str, Path], text: Path, **more: object) -> dict[str, Any]:
    given = {
        "target": str(family_dirs["llama"]),
        "data": str(text),
        "student": "medusa:heads=2",
        "steps": 6,
        "batch_size": 2,
    }
    return (
        given
        | {
            "batch_size": 2,
            "seq_len": 32,
            "training_dtype": "float32",
            "eval_steps": 2,
            "save_steps": 2,
            "lr": 3e-3,
        }
        | more
    )


@pytest.fixture(scope="module")
def trained(family_dirs: dict[str, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("medusa") / "heads"
    COMMANDS["distill"](**words(family_dirs, text), out=out)
    return out


def test_training_lowers_the_loss_of_heads_and_leaves_the_target_alone(family_dirs, text, tmp_path):
    before = (family_dirs["llama"] / "model.safetensors").read_bytes()
    outcome = COMMANDS["distill"](**words(family_dirs, text, steps=30, lr=2e-3, eval_steps=30), out=tmp_path / "heads")
    found = cast(Any, outcome.data)
    assert found["after"]["loss"] < found["before"]["loss"]
    assert [set(one) for one in found["heads"]] == [{"acceptance", "agreement"}] * 2
    mean = sum(one["acceptance"] * n for one, n in zip(found["heads"], (31, 30), strict=True)) / 61
    assert mean == pytest.approx(found["after"]["acceptance"], abs=PASS_ROUNDING)
    assert (family_dirs["llama"] / "model.safetensors").read_bytes() == before


def test_a_killed_run_writes_the_heads_of_one_that_was_not(trained, family_dirs, text, tmp_path):
    with training_killed_at(4):
        COMMANDS["distill"](**words(family_dirs, text), out=tmp_path / "heads")
    COMMANDS["distill"](**words(family_dirs, text), out=tmp_path / "heads")
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]
    found, wanted = (load_file(folder / medusa.WEIGHTS) for folder in (tmp_path / "heads", trained))
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    assert all(weight.any() for weight in wanted.values())


def test_heads_of_a_step_in_parts_are_those_of_the_whole_step(trained, family_dirs, text, tmp_path):
    """A micro-batch has room for three rows of 32 tokens, but the two rows of a text must stay together."""
    asked = words(family_dirs, text, micro_batch_tokens=100)
    COMMANDS["distill"](**asked, out=tmp_path / "heads")
    found, wanted = (load_file(folder / medusa.WEIGHTS) for folder in (tmp_path / "heads", trained))
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0.01 * float(weight.abs().max()))


def test_what_was_written_is_read_and_decodes_as_the_target(trained, family_dirs, target):
    heads = medusa.read(trained, family_dirs["llama"])
    assert heads.shape == (2, HIDDEN, HIDDEN)
    sampling = SamplingParams(max_tokens=16)
    found = output_tokens(speculative_decode(target, MedusaDrafter(target, heads), PROMPTS, 2, sampling))
    assert found == output_tokens(decode(target, PROMPTS, sampling))


def test_heads_of_another_target_are_refused(trained, family_dirs):
    with pytest.raises(UserError, match=r"another target than .*qwen3"):
        medusa.read(trained, family_dirs["qwen3"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [(MANIFEST, b'{"heads": 0}', "medusa.json"), (medusa.WEIGHTS, b"garbage", "heads.safetensors")],
)
def test_broken_heads_are_refused(trained, family_dirs, tmp_path, file, content, message):
    for one in trained.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        medusa.read(tmp_path, family_dirs["llama"])


@pytest.mark.parametrize("parents", [None, (0, 0, 0, 1, 1, 2, 4)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_draft_the_same_in_every_mode(target, parents, temperature):
    """Chains and trees read the state that a pass in each mode stored after the last layer."""
    sampling, found = SamplingParams(max_tokens=32, temperature=temperature), []
    for model in (target, NativeLlama(target), CudaGraphLlama(target)):
        drafter = recording(MedusaDrafter, model, random_heads(), parents)
        steps = speculative_decode(model, drafter, PROMPTS, len(parents or "123"), sampling)
        texts = output_tokens(steps)
        # compare only the first two drafts: a mode with graphs may draft more tokens than the texts have room for
        found.append((texts, [draft.ids.tolist() for _, draft in drafter.seen[:2]]))
    assert found[0] == found[1] == found[2]
    if temperature == 0:
        assert found[0][0] == output_tokens(decode(target, PROMPTS, sampling))


def test_a_level_of_a_tree_has_the_most_probable_tokens_of_its_head(target):
    parents = (0, 0, 1, 1, 2, 2)
    drafter = recording(MedusaDrafter, target, random_heads(), parents)
    chain = recording(MedusaDrafter, target, random_heads())
    for one, k in ((drafter, 6), (chain, 2)):
        output_tokens(speculative_decode(target, one, PROMPTS[:1], k, SamplingParams(max_tokens=8)))
    tree, first = drafter.seen[0][1].ids[0].tolist(), chain.seen[0][1].ids[0].tolist()
    assert (tree[0], tree[2]) == tuple(first)
    assert tree[2:4] == tree[4:6]
    assert len(set(tree[:2])) == len(set(tree[2:4])) == 2


@pytest.fixture
def heads(family_dirs: dict[str, Path], tmp_path: Path) -> Path:
    (tmp_path / "heads").mkdir()
    medusa.write(tmp_path / "heads", {str(i): w for i, w in enumerate(random_heads(1))}, family_dirs["llama"])
    return tmp_path / "heads"


def test_medusa_heads_are_vllms(heads, family_dirs, target, tmp_path):
    """Compare draftlab's drafts with a reimplementation of vLLM's models/medusa.py on the exported file."""
    out = tmp_path / "out"
    EXPORT_MEDUSA(heads=heads, target=str(family_dirs["llama"]), out=out)
    config, tensors = (
        json.loads((out / "config.json").read_text()),
        load_file(out / "model.safetensors"),
    )
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == (
        "medusa",
        HEADS,
        1,
    )
    assert config["original_lm_head"]
    assert f'\\"num_speculative_tokens\\": {HEADS}' in (out / "serve.sh").read_text()
    assert config["vocab_size"] == len(tensors["lm_heads.0.weight"])
    ids = [[0, 17, 44, 101, 9]]
    drafter = MedusaDrafter(target, medusa.read(heads, family_dirs["llama"]))
    step = next(iter(speculative_decode(target, drafter, ids, HEADS, SamplingParams(max_tokens=2))))
    text, uniform = [[*ids[0], *step.tokens]], torch.zeros(1, HEADS)
    state = llama.rms_norm(drafter.states.states[0, 4], target.norm, target.eps)
    theirs = []
    for i in range(HEADS):
        block = state + silu(linear(state, tensors[f"blocks.{i}.layers.0.weight"]))
        theirs.append(int(linear(block, tensors["lm_heads.0.weight"]).argmax()))
    assert drafter.propose(text, HEADS, SamplingParams(), uniform).ids[0].tolist() == theirs


def test_the_program_shows_its_options():
    command = [sys.executable, "-m", "draftlab_research.export_medusa", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--target" in shown


def test_medusas_target_takes_ids_of_its_own_device():
    """FrozenTarget compares the first ids with its empty cached ids, which are on the CPU."""
    target = FrozenTarget(build("llama"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, 4, dtype=torch.long, device="cuda")
        asked: list[torch.Tensor] = []
        target.model.get_decoder = lambda: lambda input_ids, **_: asked.append(input_ids) or Output(input_ids)  # type: ignore[method-assign]
        target(ids)
    assert len(asked) == 1


class Output:
    def __init__(self, ids: Any) -> None:
        self.last_hidden_state = ids


def test_heads_are_those_of_a_run_on_the_cpu(family_dirs, text, tmp_path, monkeypatch):
    asked = words(family_dirs, text, steps=2)
    wanted = cast(Any, COMMANDS["distill"](**asked, out=tmp_path / "cpu").data)
    load = checkpoint.load_model

    def loaded(directory: Path, dtype: torch.dtype, device: torch.device, *others: Any) -> Any:
        with without_second_device():  # transformers gives the device meta another meaning
            model = load(directory, dtype, torch.device("cpu"), *others)
        return model.to(cast(Any, device))

    def select(name: str) -> torch.device:
        monkeypatch.setitem(PartialState._shared_state, "device", DEVICE)
        return DEVICE

    monkeypatch.setattr(checkpoint, "load_model", loaded)
    monkeypatch.setattr(medusa_training, "select_device", select)
    with SecondDevice():
        found = cast(Any, COMMANDS["distill"](**asked, out=tmp_path / "elsewhere").data)
    for moment in ("before", "after"):
        assert found[moment]["loss"] == pytest.approx(wanted[moment]["loss"], rel=PASS_ROUNDING)
