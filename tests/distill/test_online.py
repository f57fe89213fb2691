"""Following traffic: the newest judges and does not train, gains are promoted, losses are not, a step back is kept."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build
from safetensors.torch import load_file
from test_store import build_store, text  # noqa: F401

from draftlab.commands import COMMANDS
from draftlab.distill import online
from draftlab.errors import UserError

update, rollback = COMMANDS["online update"], COMMANDS["online rollback"]
FAST = {"steps": 30, "batch_size": 4, "training_dtype": "float32", "optimizer": "adamw", "lr": 3e-3}
FAST |= {"eval_steps": 15, "save_steps": 10}


@pytest.fixture(scope="module")
def draft(family_dirs, tmp_path_factory) -> Path:
    """The target with noise on its weights: close, and with something to learn."""
    out = tmp_path_factory.mktemp("draft") / "noisy"
    model = build("llama")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.06)
    model.save_pretrained(out)
    for file in family_dirs["llama"].glob("tokenizer*"):
        shutil.copyfile(file, out / file.name)
    return out


@pytest.fixture(scope="module")
def world(family_dirs, text, tmp_path_factory) -> Path:  # noqa: F811
    """A base cache and two of traffic, all of what the target wrote."""
    root = tmp_path_factory.mktemp("world")
    for number, name in enumerate(("base", "traffic/day1", "traffic/day2")):
        build_store(
            family_dirs["llama"],
            text,
            root / name,
            text="target",
            num_sequences=48,
            seq_len=40,
            top_logprobs=307,
            seed=number,
        )
    return root


def follow(world: Path, folder: Path, draft: Path, **changes):
    words = {"traffic": world / "traffic", "outputs": world / "base", "draft": str(draft), "out": folder}
    return update(**words | FAST | changes)


@pytest.fixture(scope="module")
def followed(world, draft, tmp_path_factory):
    """A folder after one round, and what that round said."""
    folder = tmp_path_factory.mktemp("followed") / "live"
    return folder, follow(world, folder, draft)


@pytest.fixture
def live(followed, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(followed[0], tmp_path / "live", symlinks=True))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "live" / "model.safetensors")


def test_a_draft_that_gains_on_unseen_traffic_is_promoted_and_can_be_taken_back(world, draft, followed, live):
    outcome = followed[1]
    assert outcome.data["promoted"], outcome.show
    assert outcome.data["after"] > outcome.data["before"]
    assert outcome.data["trained_on"] == ("day1",)
    assert outcome.data["judged_by"] == "day2"
    assert (live / "live").resolve().name == "0001"
    start = load_file(draft / "model.safetensors")
    assert any(not torch.equal(start[name], w) for name, w in weights(live).items())
    assert "nothing newer" in follow(world, live, draft).show[0]
    rollback(folder=live)
    assert all(torch.equal(start[name], w) for name, w in weights(live).items())
    with pytest.raises(UserError, match="no version before 0"):
        rollback(folder=live)


def test_a_draft_that_loses_is_not_promoted_and_vanishes_at_once(world, draft, tmp_path, monkeypatch):
    bad = tmp_path / "bad"
    shutil.copytree(world, bad)
    spoil(bad / "traffic" / "day1")
    remove, removed = shutil.rmtree, []

    def seen(path, *given, **options):
        removed.append(Path(path).name)
        remove(path, *given, **options)

    monkeypatch.setattr(shutil, "rmtree", seen)
    outcome = follow(bad, tmp_path / "live", draft, replay=0.0, steps=60, eval_steps=60)
    assert not outcome.data["promoted"]
    assert removed
    assert not any(name.startswith("candidate") for name in removed)  # a kill would leave half of one to be judged
    assert (tmp_path / "live" / "live").resolve().name == "0000"
    assert [p.name for p in (tmp_path / "live" / "versions").iterdir()] == ["0000"]
    assert [r.judged_by for r in online.read_ledger(tmp_path / "live").rounds] == ["day2"]


def test_what_judges_does_not_train(world, draft, followed, family_dirs, text, tmp_path):  # noqa: F811
    other = tmp_path / "other"
    shutil.copytree(world, other)
    shutil.rmtree(other / "traffic" / "day2")
    build_store(
        family_dirs["llama"], text, other / "traffic" / "day2", text="target", num_sequences=40, seq_len=40, seed=9
    )
    follow(other, tmp_path / "b", draft)
    found, wanted = weights(followed[0]), weights(tmp_path / "b")
    assert all(torch.equal(found[name], w) for name, w in wanted.items())


def test_a_round_that_was_killed_goes_on(world, draft, followed, tmp_path, monkeypatch):
    real = online.judge

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(online, "judge", killed)
    with pytest.raises(KeyboardInterrupt):
        follow(world, tmp_path / "live", draft)
    assert (tmp_path / "live" / "live").resolve().name == "0000"  # nothing is served that was not judged
    monkeypatch.setattr(online, "judge", real)
    renamed = Path.rename

    def stopped(self, target):
        moved = renamed(self, target)
        if "versions" in str(target) and "candidate" not in str(target):
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        follow(world, tmp_path / "live", draft)
    monkeypatch.setattr(Path, "rename", renamed)
    assert (tmp_path / "live" / "live").resolve().name == "0000"
    assert follow(world, tmp_path / "live", draft).data["promoted"]
    found, wanted = weights(tmp_path / "live"), weights(followed[0])
    assert all(torch.equal(found[name], w) for name, w in wanted.items())


def test_only_the_live_version_and_the_one_before_are_kept(world, draft, live, family_dirs, text, tmp_path):  # noqa: F811
    mine = tmp_path / "world"
    shutil.copytree(world, mine)
    for day in (3, 4):
        build_store(
            family_dirs["llama"], text, mine / "traffic" / f"day{day}", text="target", num_sequences=48, seq_len=40,
            top_logprobs=307, seed=day,
        )  # fmt: skip
        outcome = follow(mine, live, draft, window=1)
        assert outcome.data["trained_on"] == (f"day{day - 1}",)
    held = online.read_ledger(live)
    kept = {p.name for p in (live / "versions").iterdir()}
    assert kept == {f"{n:04d}" for n in (held.live, held.before) if n is not None}
    assert len(held.rounds) == 3


@pytest.mark.parametrize(
    ("changes", "message"), [({"traffic": "nowhere"}, "nowhere: No such file"), ({"outputs": "data"}, "--text target")]
)
def test_what_cannot_be_followed_is_said(changes, message, world, draft, family_dirs, text, tmp_path):  # noqa: F811
    changes = dict(changes)
    if changes.get("outputs") == "data":
        build_store(family_dirs["llama"], text, tmp_path / "data", num_sequences=8)
        changes["outputs"] = tmp_path / "data"
    if "traffic" in changes:
        changes["traffic"] = tmp_path / changes["traffic"]
    with pytest.raises(UserError, match=message):
        follow(world, tmp_path / "live", draft, **changes)


def spoil(cache: Path) -> None:
    """Lists that are all but sure of some other token, with checksums made right."""
    from safetensors.numpy import load_file as load
    from safetensors.numpy import save_file

    from draftlab import provenance
    from draftlab.target_outputs.store import read_manifest

    file = cache / "shard-00000.safetensors"
    arrays = load(file)
    rng = np.random.default_rng(0)
    wrong = rng.permuted(np.arange(307, dtype=np.uint32))
    labels = arrays["ids"]
    ids = wrong[arrays["top_ids"]]
    logp = np.where(np.arange(307) == 0, -0.001, -14 - 0.01 * np.arange(307)).astype(np.float16)
    logp = np.broadcast_to(logp, ids.shape).copy()
    came = np.take_along_axis(logp, (ids == labels[..., None]).argmax(-1)[..., None], -1)[..., 0]
    arrays |= {"top_ids": ids, "top_logprobs": logp, "token_logprob": came}
    save_file(arrays, file)
    manifest = read_manifest(cache)
    shard = manifest.shards[0].model_copy(update={"sha256": provenance.file_sha256(file)})
    (cache / "manifest.json").write_text(manifest.model_copy(update={"shards": (shard,)}).model_dump_json())
