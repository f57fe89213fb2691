"""A cache says what the target says, within fp16, for ever; and one that does not is found out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import build, lesson
from safetensors.numpy import load_file, save_file

from draftlab import checkpoint, provenance
from draftlab.data import Batch, text_batch
from draftlab.distill import cache
from draftlab.distill.cache import TEMPERATURES, Building, CachedBatches, open_cache, read_manifest
from draftlab.distill.cache import build as build_cache
from draftlab.distill.loop import EvalRecord, Settings, StepRecord, train
from draftlab.distill.losses import log_probs
from draftlab.distill.teacher import CachedTeacher, LocalTeacher
from draftlab.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(200)))
    return str(file)


def how(target: Path, data: str, **changes) -> Building:
    return Building(
        **{
            "target": target, "data": data, "text": "data", "sequences": 20, "seq_len": 16, "prompt_tokens": 4,
            "temperature": 1.0, "k": 8, "seed": 0, "device": CPU,
        } | changes
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(family_dirs, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cache") / "c"
    build_cache(how(family_dirs["llama"], text), out)
    return out


def whole(target: Path, batch: Batch) -> torch.Tensor:
    """The target's log-probabilities [n, V] where the batch counts."""
    teacher = LocalTeacher(checkpoint.load_model(target, torch.float32).eval(), 307, CPU)
    return teacher.look(batch).log_probs(slice(None), 1.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_is_read_back_is_the_targets_distribution(temperature, made, family_dirs):
    batch = CachedBatches(made, 4, temperature).batch(2)
    listed = CachedTeacher(307).look(batch)
    log_p = log_probs(whole(family_dirs["llama"], replace(batch, listed=None)), temperature)
    assert torch.equal(listed.ids.sort().values, log_p.topk(8).indices.sort().values)
    torch.testing.assert_close(listed.log_p, log_p.gather(1, listed.ids), atol=8e-3, rtol=1e-3)
    tail = 1 - log_p.gather(1, listed.ids).exp().sum(1)
    torch.testing.assert_close(listed.tail.exp(), tail, atol=4e-3, rtol=0)
    assert (listed.log_p.exp().sum(1) + listed.tail.exp() - 1).abs().max() < 4e-3  # and never renormalised


def test_rows_are_those_of_the_text_in_turn(made):
    batches = CachedBatches(made, 6)
    seen = np.concatenate([batches.batch(step).ids for step in range(10)])
    stored = load_file(made / "shard-00000.safetensors")["input_ids"]
    assert np.array_equal(seen, np.tile(stored, (3, 1)))
    assert np.array_equal(batches.batch(7).ids, CachedBatches(made, 6).batch(7).ids)


def test_a_killed_build_goes_on_to_the_same_cache(family_dirs, text, made, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SHARD_ROWS", 8)
    target = family_dirs["llama"]
    build_cache(how(target, text), tmp_path / "a")
    shard = cache._shard
    calls = 0

    def killed(*arguments):
        nonlocal calls
        calls += 1
        if calls == 4:  # one for the held-out text, then the third shard
            raise KeyboardInterrupt
        return shard(*arguments)

    monkeypatch.setattr(cache, "_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        build_cache(how(target, text), tmp_path / "b")
    with pytest.raises(UserError, match="unfinished"):
        CachedBatches(tmp_path / "b", 2)
    build_cache(how(target, text), tmp_path / "b")
    for file in sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    with pytest.raises(UserError, match="another cache"):
        build_cache(how(target, text, seed=1), tmp_path / "a")


def spoilt(made: Path, out: Path, change) -> Path:
    """A copy of the cache whose first shard was changed, with a checksum that fits."""
    shard = load_file(made / "shard-00000.safetensors")
    change(shard)
    out.mkdir()
    save_file(shard, out / "shard-00000.safetensors")
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = provenance.file_sha256(out / "shard-00000.safetensors")
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def shift(shard: dict[str, np.ndarray]) -> None:
    shard["input_ids"] = np.roll(shard["input_ids"], 1, axis=1)


def another_tokenizer(shard: dict[str, np.ndarray]) -> None:
    shard["input_ids"] = (shard["input_ids"] * 7 + 3) % 307


@pytest.mark.parametrize("change", [shift, another_tokenizer])
def test_a_shifted_or_foreign_cache_is_found_without_the_target(change, made, tmp_path):
    with pytest.raises(UserError, match="contradict their lists"):
        CachedBatches(spoilt(made, tmp_path / "c", change), 4)


def test_a_corrupt_shard_is_found(made, tmp_path):
    out = spoilt(made, tmp_path / "c", lambda shard: None)
    data = bytearray((out / "shard-00000.safetensors").read_bytes())
    data[-100] ^= 1
    (out / "shard-00000.safetensors").write_bytes(bytes(data))
    with pytest.raises(UserError, match="corrupt"):
        CachedBatches(out, 4)
    (out / "shard-00000.safetensors").unlink()
    with pytest.raises(UserError, match="No such file"):
        CachedBatches(out, 4)
    with pytest.raises(UserError, match="not a cache"):
        read_manifest(tmp_path)


def test_another_vocabulary_or_temperature_is_refused(made, family_dirs):
    with pytest.raises(UserError, match="has another"):
        open_cache(made, checkpoint.locate("tiny"), rows=4, temperature=1.0)
    with pytest.raises(UserError, match="holds temperatures"):
        open_cache(made, family_dirs["llama"], rows=4, temperature=0.9)


def test_verify_finds_the_target_that_made_it_and_no_other(made, family_dirs, tmp_path):
    assert cache.verify(made, family_dirs["llama"], 0, CPU).good
    other = build("llama", seed=5)
    other.save_pretrained(tmp_path)
    for file in family_dirs["llama"].glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert not cache.verify(made, tmp_path, 0, CPU).good


def test_text_of_the_targets_own_counts_only_what_it_wrote(family_dirs, text, tmp_path):
    build_cache(how(family_dirs["llama"], text, text="target", sequences=6), tmp_path / "c")
    batch = CachedBatches(tmp_path / "c", 6).batch(0)
    assert (batch.mask[:, :3] == 0).all()
    assert (batch.mask[:, 3] == 1).all()


SETTINGS = Settings(loss="fkl", steps=6, lr=3e-3, dtype="float32", eval_every=6, save_every=2, weight_decay=0.0)


def fit(batches, teacher, state: Path, settings: Settings = SETTINGS, stop: int | None = None):
    model = build("llama", 3, num_hidden_layers=2)
    records = []
    for record in train(model, lesson(teacher, batches, [batches.batch(99)]), settings, state):
        records.append(record)
        if isinstance(record, StepRecord) and record.step == stop:
            break
    return model, records


def test_training_from_a_whole_cache_is_training_with_the_target(family_dirs, text, tmp_path):
    """With every token listed only fp16 is lost: the same steps, nearly."""
    target = family_dirs["llama"]
    build_cache(how(target, text, k=307), tmp_path / "c")
    batches = CachedBatches(tmp_path / "c", 4)

    class Bare:
        def batch(self, step: int) -> Batch:
            return replace(batches.batch(step), listed=None)

    gentle = replace(SETTINGS, lr=1e-4)
    teacher = checkpoint.load_model(target, torch.float32)
    _, cached = fit(batches, CachedTeacher(307), tmp_path / "a", gentle)
    _, local = fit(Bare(), teacher, tmp_path / "b", gentle)
    for a, b in zip(cached, local, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-3)
        assert a.acceptance == pytest.approx(b.acceptance, abs=2e-3)


def test_a_resumed_run_from_a_cache_is_the_uninterrupted_one(made, tmp_path):
    batches = CachedBatches(made, 3)
    wanted, records = fit(batches, CachedTeacher(307), tmp_path / "a")
    fit(batches, CachedTeacher(307), tmp_path / "b", stop=3)
    found, _ = fit(batches, CachedTeacher(307), tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))
    assert isinstance(records[-1], EvalRecord)
    assert isinstance(records[0], EvalRecord)
    assert records[-1].loss < records[0].loss


def test_a_batch_without_lists_is_no_batch_of_a_cache():
    with pytest.raises(ValueError, match="nothing of a target"):
        CachedTeacher(307).look(text_batch([np.arange(5)]))


def test_acceptance_from_few_tokens_is_a_lower_end_with_its_slack(made, family_dirs, tmp_path):
    batches = CachedBatches(made, 4)
    model = build("llama", 3, num_hidden_layers=2)
    teacher = checkpoint.load_model(family_dirs["llama"], torch.float32)
    bare = replace(batches.batch(0), listed=None)
    few, whole = (
        next(iter(train(model, lesson(given, batches, [rows]), SETTINGS, tmp_path / name)))
        for name, given, rows in (("a", CachedTeacher(307), batches.batch(0)), ("b", teacher, bare))
    )
    assert few.acceptance - 1e-3 <= whole.acceptance <= few.acceptance + few.slack + 1e-3
    assert few.slack > 0.01
    assert whole.slack == 0
