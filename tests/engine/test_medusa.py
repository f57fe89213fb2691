"""Medusa heads: what they read and learn from is where it should be, and text is the target's whatever they say."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from builders import build, recording, training_killed_at
from safetensors.torch import load_file

from draftlab.commands import COMMANDS
from draftlab.config.drafters import parse_drafter
from draftlab.data import Batch
from draftlab.distill.medusa_heads import FrozenTarget, Heads, SelfTeacher, repeat_rows
from draftlab.distill.teachers import LocalTeacher
from draftlab.engine.drafters import medusa
from draftlab.engine.drafters.medusa import MedusaDrafter
from draftlab.engine.generate import decode, output_tokens, speculative_decode
from draftlab.errors import UserError
from draftlab.model import llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.sampling import SamplingParams

PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]
HIDDEN, HEADS = 64, 3


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path]) -> llama.Llama:
    return llama.load(family_dirs["llama"], torch.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 60 for i in range(40)))
    return file


def random_heads(seed: int = 0) -> torch.Tensor:
    return torch.randn(HEADS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_of_zero_repeat_the_token_that_the_target_chose_last(target, k, rows):
    """They are its own head on the state before it: any other place of the cache would say something else."""
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
    spread = repeat_rows(Batch(ids, np.ones((2, 12), np.float32)), HEADS)
    assert spread.mask.reshape(2, HEADS, 12).sum(2).tolist() == [[11, 10, 9]] * 2
    found = SelfTeacher(trunk, HEADS).distributions(spread)
    wanted = LocalTeacher(build("llama"), 307, torch.device("cpu")).distributions(spread)
    torch.testing.assert_close(found.hidden, wanted.hidden)
    states = student.states(torch.from_numpy(spread.ids[:, :-1]))
    own = trunk(torch.from_numpy(ids[:, :-1]))
    for k in range(1, HEADS + 1):  # zero heads: the target's states, k positions later
        torch.testing.assert_close(states[k - 1 :: HEADS][:, k:], own[:, :-k])


def words(family_dirs: dict[str, Path], text: Path, **more: object) -> dict[str, Any]:
    given = {"target": str(family_dirs["llama"]), "data": str(text), "heads": 2, "steps": 6, "batch_size": 2}
    return given | {"seq_len": 32, "training_dtype": "float32", "eval_steps": 2, "save_steps": 2, "lr": 3e-3} | more


@pytest.fixture(scope="module")
def trained(family_dirs: dict[str, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("medusa") / "heads"
    COMMANDS["medusa"](**words(family_dirs, text), out=out)
    return out


def test_training_lowers_the_loss_of_heads_and_leaves_the_target_alone(family_dirs, text, tmp_path):
    before = (family_dirs["llama"] / "model.safetensors").read_bytes()
    outcome = COMMANDS["medusa"](**words(family_dirs, text, steps=30, lr=1e-2, eval_steps=30), out=tmp_path / "heads")
    found = cast(Any, outcome.data)
    assert found["after"]["loss"] < 0.9 * found["before"]["loss"]
    assert [set(one) for one in found["heads"]] == [{"acceptance", "agreement"}] * 2
    mean = sum(one["acceptance"] * n for one, n in zip(found["heads"], (31, 30), strict=True)) / 61
    assert mean == pytest.approx(found["after"]["acceptance"], abs=1e-5)
    assert (family_dirs["llama"] / "model.safetensors").read_bytes() == before


def test_a_killed_run_writes_the_heads_of_one_that_was_not(trained, family_dirs, text, tmp_path):
    with training_killed_at(4):
        COMMANDS["medusa"](**words(family_dirs, text), out=tmp_path / "heads")
    COMMANDS["medusa"](**words(family_dirs, text), out=tmp_path / "heads")
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]
    found, wanted = (load_file(folder / medusa.WEIGHTS) for folder in (tmp_path / "heads", trained))
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    assert all(weight.any() for weight in wanted.values())


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
    [
        (medusa.MANIFEST, None, r"no Medusa heads \(medusa.json"),
        (medusa.MANIFEST, b'{"heads": 0}', "medusa.json is not a manifest: heads"),
        (medusa.WEIGHTS, b"garbage", "heads.safetensors is not a readable safetensors"),
        (medusa.WEIGHTS, None, "heads.safetensors"),
    ],
)
def test_broken_heads_are_refused(trained, family_dirs, tmp_path, file, content, message):
    for one in trained.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        medusa.read(tmp_path, family_dirs["llama"])


def test_modes_without_hidden_states_are_refused(target):
    with pytest.raises(UserError, match="mode eager"):
        MedusaDrafter(CudaGraphLlama(target), random_heads())


def test_the_drafter_must_be_told_where_the_heads_are():
    with pytest.raises(UserError, match="--drafter medusa: heads"):
        parse_drafter("medusa")
