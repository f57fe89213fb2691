"""A cache says what the target says, within fp16, for ever; and one that does not is found out."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import altered, build, setup
from loopback_servers import SmallVLLM, replay, running
from safetensors.numpy import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM

from draftlab import provenance, workspace
from draftlab.commands import cache as commands
from draftlab.config.shared import TrainerSettings
from draftlab.data import Batch, text_batch
from draftlab.distill.fused_loss import TopK
from draftlab.distill.losses import log_probs, parse_loss
from draftlab.distill.teachers import LocalTeacher, ServedTeacher, StoredTeacher
from draftlab.distill.trainer import DistillStep, EvalRecord, StepRecord, train
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs import cache
from draftlab.target_outputs.cache import Building, CachedBatches, open_cache, read_manifest
from draftlab.target_outputs.logprob_sources import TEMPERATURES, Local, Served
from draftlab.target_outputs.server_log import Traffic

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(200)))
    return str(file)


def building(data: str, **changes) -> Building:
    return Building(
        **{
            "data": data, "text": "data", "sequences": 20, "seq_len": 16, "prompt_tokens": 4, "temperature": 1.0,
            "k": 8, "seed": 0,
        } | changes
    )  # fmt: skip


def build_cache(target: Path, data: str, out: Path, **changes) -> None:
    cache.build(building(data, **changes), Local(target, CPU), out)


@pytest.fixture(scope="module")
def made(family_dirs, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cache") / "c"
    build_cache(family_dirs["llama"], text, out)
    return out


def whole(target: Path, batch: Batch) -> torch.Tensor:
    """The target's log-probabilities [n, V] where the batch counts."""
    teacher = LocalTeacher(checkpoint.load_model(target, torch.float32).eval(), 307, CPU)
    return teacher.distributions(batch).log_probs(slice(None), 1.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_is_read_back_is_the_targets_distribution(temperature, made, family_dirs):
    batch = CachedBatches(made, 4, temperature).batch(2)
    listed = StoredTeacher(307).distributions(batch)
    log_p = log_probs(whole(family_dirs["llama"], replace(batch, top_logprobs=None)), temperature)
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
    build_cache(target, text, tmp_path / "a")
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
        build_cache(target, text, tmp_path / "b")
    with pytest.raises(UserError, match="unfinished"):
        CachedBatches(tmp_path / "b", 2)
    build_cache(target, text, tmp_path / "b")
    for file in sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    with pytest.raises(UserError, match="another cache"):
        build_cache(target, text, tmp_path / "a", seed=1)


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
        open_cache(made, hub.locate("tiny"), rows=4, temperature=1.0)
    with pytest.raises(UserError, match="holds temperatures"):
        open_cache(made, family_dirs["llama"], rows=4, temperature=0.9)


def test_verify_finds_the_target_that_made_it_and_no_other(made, family_dirs, tmp_path):
    assert cache.verify(made, Local(family_dirs["llama"], CPU), 0).good
    other = build("llama", seed=5)
    other.save_pretrained(tmp_path)
    for file in family_dirs["llama"].glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert not cache.verify(made, Local(tmp_path, CPU), 0).good


def test_text_of_the_targets_own_counts_only_what_it_wrote(family_dirs, text, tmp_path):
    build_cache(family_dirs["llama"], text, tmp_path / "c", text="target", sequences=6)
    batch = CachedBatches(tmp_path / "c", 6).batch(0)
    assert (batch.mask[:, :3] == 0).all()
    assert (batch.mask[:, 3] == 1).all()


SETTINGS = TrainerSettings(steps=6, optimizer="adamw", lr=3e-3, training_dtype="float32", eval_steps=6, save_steps=2)


def fit(batches, teacher, state: Path, settings: TrainerSettings = SETTINGS, stop: int | None = None):
    model = build("llama", 3, num_hidden_layers=2)
    records = []
    for record in train(model, setup(teacher, batches, [batches.batch(99)]), settings, state):
        records.append(record)
        if isinstance(record, StepRecord) and record.step == stop:
            break
    return model, records


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_what_is_seen_is_the_targets_own_whatever_the_memory(kind, family_dirs, tokenizer_dir, tmp_path):
    """Any causal language model: the engine's, and one that transformers runs; in one pass, rows and parts of a row."""
    place = family_dirs["llama"]
    if kind == "opt":
        place = tmp_path / "opt"
        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=307, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, word_embed_proj_dim=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
            init_std=0.5,
        )  # fmt: skip
        OPTForCausalLM(config).save_pretrained(place)
        shutil.copytree(tokenizer_dir, place, dirs_exist_ok=True)
    model = checkpoint.load_model(place, torch.float32).eval()
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(3, 300, (5, 21)), rng.integers(0, 2, (5, 20)).astype(np.float32)
    with torch.no_grad():
        log_p = model(torch.from_numpy(ids[:, :-1])).logits.log_softmax(-1)[torch.from_numpy(mask) > 0]
    came = log_p.gather(1, torch.from_numpy(ids[:, 1:][mask > 0])[:, None])[:, 0]
    for positions in (1000, 45, 7):
        seen = Local(place, CPU, memory=positions * 16 * 307 / 1e9).see(Batch(ids, mask), 8)
        np.testing.assert_allclose(seen.topk_logp.astype(np.float32), log_p.topk(8).values, atol=2e-2)
        np.testing.assert_allclose(seen.tok_logp.astype(np.float32), came, atol=2e-2)
    batch, seen = Local(place, CPU).write(ids[:, :4], SamplingParams(max_tokens=17, temperature=1.0, seed=0), 8)
    assert np.array_equal(batch.ids[:, :4], ids[:, :4])
    assert len(seen.tok_logp) == batch.mask.sum() > 0


def test_training_from_a_whole_cache_is_training_with_the_target(family_dirs, text, tmp_path):
    """With every token listed only fp16 is lost: the same steps, nearly."""
    target = family_dirs["llama"]
    build_cache(target, text, tmp_path / "c", k=307)
    batches = CachedBatches(tmp_path / "c", 4)

    class Bare:
        def batch(self, step: int) -> Batch:
            return replace(batches.batch(step), top_logprobs=None)

    gentle = altered(SETTINGS, lr=1e-4)
    teacher = checkpoint.load_model(target, torch.float32)
    _, cached = fit(batches, StoredTeacher(307), tmp_path / "a", gentle)
    _, local = fit(Bare(), teacher, tmp_path / "b", gentle)
    for a, b in zip(cached, local, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-3)
        assert a.acceptance == pytest.approx(b.acceptance, abs=2e-3)


def test_a_resumed_run_from_a_cache_is_the_uninterrupted_one(made, tmp_path):
    batches = CachedBatches(made, 3)
    wanted, records = fit(batches, StoredTeacher(307), tmp_path / "a")
    fit(batches, StoredTeacher(307), tmp_path / "b", stop=3)
    found, _ = fit(batches, StoredTeacher(307), tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), found.parameters(), strict=True))
    assert isinstance(records[-1], EvalRecord)
    assert isinstance(records[0], EvalRecord)
    assert records[-1].loss < records[0].loss


def test_a_batch_without_lists_is_no_batch_of_a_cache():
    with pytest.raises(ValueError, match="target"):
        StoredTeacher(307).distributions(text_batch([np.arange(5)]))


def test_acceptance_from_few_tokens_is_a_lower_end_with_its_slack(made, family_dirs, tmp_path):
    batches = CachedBatches(made, 4)
    model = build("llama", 3, num_hidden_layers=2)
    teacher = checkpoint.load_model(family_dirs["llama"], torch.float32)
    bare = replace(batches.batch(0), top_logprobs=None)
    few, whole = (
        next(iter(train(model, setup(given, batches, [rows]), SETTINGS, tmp_path / name)))
        for name, given, rows in (("a", StoredTeacher(307), batches.batch(0)), ("b", teacher, bare))
    )
    assert few.acceptance - 1e-3 <= whole.acceptance <= few.acceptance + few.slack + 1e-3
    assert few.slack > 0.01
    assert whole.slack == 0


STOPS = frozenset(range(0, 307, 20))


@pytest.fixture(scope="module")
def small(family_dirs) -> Iterator[Server]:
    """The small llama on a server that speaks as vLLM does."""
    target = family_dirs["llama"]
    model = checkpoint.load_model(target, torch.float32).eval()
    with running(SmallVLLM(model, checkpoint.load_tokenizer(target), STOPS)) as url:
        yield Server.connect(url)


def keep_served(server: Server, target: Path, data: str, out: Path, **changes) -> None:
    how = building(data, **changes)
    cache.build(how, Served.of(server, target, how.temperature if how.text == "target" else None), out)


def same_lists(a: Path, b: Path) -> None:
    """Two caches hold the same text, and the same of every token that counts."""
    for part in ("", "heldout"):
        ours, theirs = (load_file(place / part / "shard-00000.safetensors") for place in (a, b))
        assert np.array_equal(ours["input_ids"], theirs["input_ids"])
        assert np.array_equal(ours["mask"], theirs["mask"])
        assert (ours["topk_id"] == theirs["topk_id"]).mean() > 0.99  # ties in fp16 apart
        for name in ("topk_logp", "tok_logp", "tail_logp"):
            assert np.abs(ours[name].astype(np.float32) - theirs[name].astype(np.float32)).max() < 0.01


def test_a_cache_from_a_server_is_that_of_the_target(small, made, family_dirs, text, tmp_path):
    keep_served(small, family_dirs["llama"], text, tmp_path / "c")
    same_lists(tmp_path / "c", made)
    manifest = read_manifest(tmp_path / "c")
    assert (manifest.source, manifest.logprobs, manifest.temperatures) == ("vllm", "raw_logprobs", (1.0,))
    assert (manifest.target, manifest.target_sha256, manifest.sampling) == ("small", None, None)
    batches, held = open_cache(tmp_path / "c", family_dirs["llama"], rows=4, temperature=1.0)
    assert StoredTeacher(307).distributions(batches.batch(0)).ids.shape == (64, 8)
    assert len(held.batches) == 16
    with pytest.raises(UserError, match="holds temperatures"):
        CachedBatches(tmp_path / "c", 4, 0.8)


def test_text_that_a_server_wrote_is_kept_with_what_it_thought(small, family_dirs, text, tmp_path):
    keep_served(small, family_dirs["llama"], text, tmp_path / "c", text="target", sequences=12, seq_len=24)
    manifest, shard = read_manifest(tmp_path / "c"), load_file(tmp_path / "c" / "shard-00000.safetensors")
    assert manifest.sampling == SamplingParams(max_tokens=21, seed=0, temperature=1.0)
    batch = Batch(shard["input_ids"].astype(np.int64), shard["mask"])
    assert (batch.mask[:, :3] == 0).all()
    for ids, mask in zip(batch.ids, batch.mask, strict=True):
        ends = np.flatnonzero(np.isin(ids[4:], list(STOPS)))
        last = 4 + ends[0] if len(ends) else 24
        assert np.array_equal(np.flatnonzero(mask), np.arange(3, last))  # the prompt and what follows eos do not count
    assert len(set(batch.mask.sum(1))) > 2
    again = Local(family_dirs["llama"], CPU).see(batch, 8)
    assert np.array_equal(again.topk_id[:, 0], shard["topk_id"][batch.mask > 0][:, 0])
    assert np.abs(again.tok_logp.astype(np.float32) - shard["tok_logp"][batch.mask > 0]).max() < 0.01


def test_a_killed_build_from_a_server_goes_on_to_the_same_cache(small, family_dirs, text, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SHARD_ROWS", 8)
    given = {"text": "target", "seq_len": 12}
    keep_served(small, family_dirs["llama"], text, tmp_path / "a", **given)
    (tmp_path / "b").mkdir()
    made = json.loads((tmp_path / "a" / "manifest.json").read_text())
    made["shards"] = made["shards"][:1]
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(made))
    first = "shard-00000.safetensors"
    (tmp_path / "b" / first).write_bytes((tmp_path / "a" / first).read_bytes())
    keep_served(small, family_dirs["llama"], text, tmp_path / "b", **given)
    for file in sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    with pytest.raises(UserError, match="another cache"):
        keep_served(small, family_dirs["llama"], text, tmp_path / "a", temperature=0.0, **given)


def test_a_server_verifies_what_its_target_said_and_nothing_else(small, made, family_dirs, tmp_path):
    found = cache.verify(made, Served.of(small, family_dirs["llama"], None), 0)
    assert found.good
    assert found.mean <= found.worst < 0.01
    other = SmallVLLM(build("llama", seed=5), checkpoint.load_tokenizer(family_dirs["llama"]), STOPS)
    with running(other) as url:
        assert not cache.verify(made, Served.of(Server.connect(url), family_dirs["llama"], None), 0).good


def test_another_tokenizer_on_the_server_is_found(small):
    with pytest.raises(UserError, match=r"not that of .*tiny: token 0 of a probing text"):
        Served.of(small, hub.locate("tiny"), None)


@pytest.mark.parametrize(
    ("mode", "temperature", "message"),
    [
        ("processed_logprobs", 0.7, "after temperature"),
        ("processed_logits", None, "logits instead of"),
        ("processed_logprobs", 1.0, None),
        ("processed_logprobs", None, None),  # of given text they are raw
    ],
)
def test_a_server_is_probed_before_anything_is_built(mode, temperature, message):
    def probed(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/tokenize":
            return 404, {"detail": "Not Found"}
        if method == "POST":  # what was recorded after another prompt
            body = body | {"prompt": [0, 309, 293, 653, 570, 346, 546]}
        return replay(mode)(method, path, body)

    with running(probed) as url:
        server = Server.connect(url)
        if message is None:
            assert Served.of(server, hub.locate("tiny"), temperature).probe.logprobs_mode == mode
            return
        with pytest.raises(UserError, match=message):
            Served.of(server, hub.locate("tiny"), temperature)


def test_a_served_teacher_looks_as_the_target_itself(small, made, family_dirs):
    batch = replace(CachedBatches(made, 4).batch(0), top_logprobs=None)
    batch = Batch(batch.ids, batch.mask * (np.arange(16) > 4) * (np.arange(16) < 13))
    batch.mask[2] = 0  # a row of which nothing counts
    listed = ServedTeacher(small, 8, 307).distributions(batch)
    log_p = whole(family_dirs["llama"], batch)
    assert listed.ids.shape == (3 * 8, 8)
    torch.testing.assert_close(listed.log_p, log_p.topk(8).values, atol=1e-4, rtol=0)
    tail = 1 - log_p.gather(1, listed.ids).exp().sum(1)
    torch.testing.assert_close(listed.tail.exp(), tail, atol=1e-5, rtol=0)
    nothing = ServedTeacher(small, 8, 307).distributions(Batch(batch.ids, np.zeros_like(batch.mask)))
    assert nothing.ids.shape == (0, 8)


def test_a_token_beyond_the_drafts_vocabulary_is_refused(small, made):
    batch = replace(CachedBatches(made, 4).batch(0), top_logprobs=None)
    with pytest.raises(UserError, match=r"token \d+.* 200 tokens"):
        ServedTeacher(small, 8, 200).distributions(batch)


def gradient(teacher: TopK, batch: Batch, loss: str) -> torch.Tensor:
    """Of one distillation step of a small draft."""
    student = build("llama", 3, num_hidden_layers=2)
    step = DistillStep(student, parse_loss(loss), 1.0)
    step(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask), teacher)[5].backward()
    return torch.cat([p.grad.flatten() for p in student.parameters()])


@pytest.mark.parametrize("loss", ["fkl", "tvd", "jsd(0.5)"])
def test_a_step_from_a_server_is_one_from_the_same_list_of_the_target(loss, small, made, family_dirs):
    batch = replace(CachedBatches(made, 4).batch(0), top_logprobs=None)
    log_p = whole(family_dirs["llama"], batch)
    values, ids = log_p.topk(8)
    local = TopK(ids, values, log_p.scatter(1, ids, -torch.inf).logsumexp(-1))
    ours, theirs = (gradient(t, batch, loss) for t in (ServedTeacher(small, 8, 307).distributions(batch), local))
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def traffic_file(path: Path, lines: list[dict | str]) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@pytest.fixture(scope="module")
def log(small, tmp_path_factory) -> Path:
    """What a server's log holds of 26 requests, some longer and some shorter than 16 tokens."""
    prompts = [[0, 10 + i, 40 + i, 100 + i][: 2 + i % 3] for i in range(26)]
    written = [
        small.generate([p], SamplingParams(max_tokens=6 + i, seed=i, temperature=1.0), k=8)[0]
        for i, p in enumerate(prompts)
    ]
    return traffic_file(tmp_path_factory.mktemp("log") / "day.jsonl", [w.as_json() for w in written])


def test_traffic_is_kept_as_the_target_would_score_it(log, family_dirs, tmp_path):
    target = family_dirs["llama"]
    traffic = Traffic.open(log, vocab=307, seq_len=16, k=64)
    assert traffic.k == 8
    manifest = cache.build_from_traffic(traffic, target, tmp_path / "c")
    assert (manifest.source, manifest.text, manifest.sequences) == ("traffic", "traffic", 24)
    batches, held = open_cache(tmp_path / "c", target, rows=24, temperature=1.0)
    batch = batches.batch(0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [b.ids[:, 1].tolist() for b in held.batches] == [[lines[i]["prompt_ids"][1] for i in (11, 23)]]
    lines = [line for i, line in enumerate(lines) if i not in (11, 23)]
    for row, mask, line in zip(batch.ids, batch.mask, lines, strict=True):
        text = (line["prompt_ids"] + line["ids"])[:17]
        assert row.tolist() == text + [0] * (17 - len(text))
        assert np.flatnonzero(mask).tolist() == list(range(len(line["prompt_ids"]) - 1, len(text) - 1))
    listed, log_p = StoredTeacher(307).distributions(batch), whole(target, replace(batch, top_logprobs=None))
    torch.testing.assert_close(listed.log_p, log_p.topk(8).values, atol=8e-3, rtol=1e-3)
    assert cache.verify(tmp_path / "c", Local(target, CPU), 0).good


def test_changed_traffic_is_another_cache(log, family_dirs, tmp_path):
    def keep(file: Path) -> None:
        cache.build_from_traffic(Traffic.open(file, vocab=307, seq_len=16, k=8), family_dirs["llama"], tmp_path / "c")

    copy = tmp_path / "day.jsonl"
    copy.write_text(log.read_text())
    keep(copy)
    keep(copy)
    copy.write_text("".join(log.read_text().splitlines(keepends=True)[:20]))
    with pytest.raises(UserError, match="another cache"):
        keep(copy)


LINE = {"prompt_ids": [0, 5], "ids": [7, 8], "top_ids": [[7, 9], [1, 8]], "logprobs": [-0.5, -2.0]} | {
    "top_logprobs": [[-0.5, -1.5], [-0.4, -2.0]]
}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "invalid json"),
        ("[1, 2]", "should be an object"),
        ({k: v for k, v in LINE.items() if k != "ids"}, "ids: field required"),
        (LINE | {"more": 1}, "more: extra inputs"),
        (LINE | {"ids": ["7", 8]}, "valid integer"),
        (LINE | {"ids": [7]}, "top_ids has 2 entries for 1 ids"),
        (LINE | {"logprobs": [-0.5]}, "logprobs has 1 entries for 2 ids"),
        (LINE | {"top_ids": [[7], [1, 8]]}, "place 0: 1 top_ids.*with 2 top_logprobs"),
        (LINE | {"top_ids": [[7, 7], [1, 8]]}, "place 0: 2 top_ids, 1 of them different"),
        (LINE | {"prompt_ids": []}, "prompt_ids is empty"),
        (LINE | {"ids": [307, 8]}, "id 307 is not among the tokenizer's 307"),
        (LINE | {"prompt_ids": [-1]}, "id -1 is not among"),
        (LINE | {"top_ids": [[7, 999], [1, 8]]}, "id 999 is not among"),
        (LINE | {"logprobs": [0.5, -2.0]}, "place 0: 0.5 is not a log-probability"),
        (LINE | {"top_logprobs": [[-0.5, -1.5], [3.0, -2.0]]}, "place 1: 3.0 is not a log-probability"),
        (
            '{"prompt_ids":[0],"ids":[7],"top_ids":[[7]],"top_logprobs":[[NaN]],"logprobs":[-1]}',
            "nan is not a log-prob",
        ),
        (LINE | {"top_logprobs": [[-0.5, -0.5], [-0.4, -2.0]]}, "place 0: the listed probabilities sum to 1.213"),
        (LINE | {"logprobs": [-0.5, -1.0]}, "token 8 has log-probability -1.0, and by the list -2.0"),
        (LINE | {"ids": [6, 8]}, "token 6 has log-probability -0.5, and by the list -1.5"),
    ],
)
def test_a_bad_line_of_traffic_is_named(line, message, tmp_path):
    file = traffic_file(tmp_path / "log.jsonl", [LINE, "", LINE, line, LINE])
    with pytest.raises(UserError, match=rf"log\.jsonl:4: .*{message}"):
        Traffic.open(file, vocab=307, seq_len=16, k=8)


def test_traffic_without_two_lines_to_keep_is_refused(tmp_path, capsys):
    def opened(lines: list) -> Traffic:
        return Traffic.open(traffic_file(tmp_path / "log.jsonl", lines), vocab=307, seq_len=3, k=8)

    for lines in ([], [LINE]):
        with pytest.raises(UserError, match=f"{len(lines)} lines with text to keep"):
            opened(lines)
    empty = {name: [] for name in LINE} | {"prompt_ids": [0]}
    with pytest.raises(UserError, match="0 lines with text to keep"):
        opened([LINE | {"prompt_ids": [1] * 4}, empty])
    assert "2 lines left out" in capsys.readouterr().err
    assert len(opened([LINE, LINE | {"prompt_ids": [1] * 3}]).starts) == 2
    with pytest.raises(UserError, match="No such file"):
        Traffic.open(tmp_path / "nope.jsonl", vocab=307, seq_len=3, k=8)


def test_lists_are_sorted_and_cut_to_what_every_line_has(tmp_path, family_dirs):
    longer = LINE | {"top_ids": [[9, 7, 3], [8, 1]], "top_logprobs": [[-1.5, -0.5, -4.0], [-2.0, -0.4]]}
    file = traffic_file(tmp_path / "log.jsonl", [longer, LINE])
    batch, entries = Traffic.open(file, vocab=307, seq_len=4, k=3).rows([0])
    assert batch.ids.tolist() == [[0, 5, 7, 8, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 0]]
    assert entries.topk_id.tolist() == [[7, 9], [1, 8]]
    assert entries.tail_logp[0] == pytest.approx(np.log(1 - np.exp(-0.5) - np.exp(-1.5)), abs=1e-5)


@pytest.fixture
def space(family_dirs, text, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    target = str(family_dirs["llama"])
    workspace.write(workspace.Workspace(target=target, source=target, data=text))
    return tmp_path


FEW = {"sequences": 4, "seq_len": 12, "k": 4}


def test_the_commands_build_and_verify_from_a_server(space, small, tmp_path):
    url = small.http.url
    assert commands.build(server=url, **FEW, dry_run=True).data["disk"] == "about 0.002016 MB"
    made = commands.build(server=url, **FEW)
    assert (made.path, made.data["source"], made.data["k"]) == (Path("runs/cache-llama"), "vllm", 4)
    record = provenance.read_record(space / "runs" / "cache-llama")
    assert record is not None
    assert record.notes["server"] == {"kind": "vllm", "version": "0.32.0", "model": "small"}
    for given in ({"server": url}, {}):
        assert commands.verify(made.path, **given).missed == []
    (space / "key").write_text("secret\n")
    with running(lambda *_: (401, {"error": "wrong key"})) as locked, pytest.raises(UserError, match="wrong key"):
        commands.build(server=locked, api_key_file=space / "key", **FEW)
    assert "secret" not in (space / "runs" / "cache-llama" / "draftlab.json").read_text()


def test_the_command_keeps_traffic_with_a_tokenizer_alone(space, log, tokenizer_dir):
    assert commands.build(traffic=log, tokenizer=tokenizer_dir, seq_len=16, dry_run=True).data["tokens"] == "416"
    made = commands.build(traffic=log, tokenizer=tokenizer_dir, seq_len=16)
    assert (made.path, made.data["source"]) == (Path("runs/cache-day"), "traffic")
    open_cache(space / "runs" / "cache-day", Path(workspace.load().target), rows=2, temperature=1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server": "http://127.0.0.1:1", "traffic": Path("a.jsonl")}, "two sources; leave out one"),
        ({"server": "http://127.0.0.1:1"}, "is the server running there"),
        ({"traffic": Path("nope.jsonl")}, "nope.jsonl: No such file"),
        ({"text": "target", "prompt_tokens": 300}, "leaves nothing to write in sequences of 256"),
        ({"server": "http://127.0.0.1:1", "api_key_file": Path("nope")}, "nope: No such file"),
        ({"tokenizer": Path("nope"), "traffic": Path("nope.jsonl")}, "nope"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(given, message, space):
    with pytest.raises(UserError, match=message):
        commands.build(**given)
    assert not (space / "runs").exists()
