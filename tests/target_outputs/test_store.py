"""A cache says what the target says, within fp16, for ever; and one that does not is found out."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds, build, save_neox
from helpers.errors import raises_option
from helpers.loopback_servers import SmallVLLM, replay, running
from helpers.small_files import copy_tokenizer, edit, write_prompts, write_rows, write_workspace
from helpers.stores import (
    build_store,
    text_fixture,  # noqa: F401
)
from safetensors.numpy import load_file, save_file

from draftlab.commands import OUTPUTS_BUILD, OUTPUTS_INFO
from draftlab.data import Batch
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub, llama
from draftlab.model.native_cpu import NativeLlama
from draftlab.runs import provenance
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs import build as building
from draftlab.target_outputs import store
from draftlab.target_outputs.batches import StoredBatches, open_stored
from draftlab.target_outputs.build import ServerLog
from draftlab.target_outputs.outputs import TEMPERATURES, padded
from draftlab.target_outputs.store import read_manifest, read_store
from draftlab.target_outputs.targets import LocalTarget, ServedTarget, verify
from draftlab.training.losses import log_probs
from draftlab.training.teachers import LocalTeacher, ServedTeacher, StoredTeacher

CPU = torch.device("cpu")


def files_of(directory: Path) -> dict[str, bytes]:
    """Return all files but the record, which says when."""
    files = (f for f in directory.rglob("*") if f.is_file() and f.name != "draftlab.json")
    return {str(f.relative_to(directory)): f.read_bytes() for f in files}


@pytest.fixture(scope="module")
def made(family_dirs, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cache") / "c"
    build_store(family_dirs["llama"], text, out)
    return out


def whole(target: Path, batch: Batch) -> torch.Tensor:
    """Return the target's log-probabilities [n, V] where the batch counts."""
    teacher = LocalTeacher(checkpoint.load_model(target, torch.float32).eval(), 307, CPU)
    return log_probs(teacher.distributions(batch).logits(slice(None)), 1.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_is_read_back_is_the_targets_distribution(temperature, made, family_dirs):
    batch = StoredBatches(made, 4, temperature).batch(2)
    listed = StoredTeacher(307).distributions(batch)
    log_p = log_probs(whole(family_dirs["llama"], replace(batch, top_logprobs=None)), temperature)
    assert torch.equal(listed.ids.sort().values, log_p.topk(8).indices.sort().values)
    # log-probabilities are stored in fp16
    assert_rounds(listed.log_p, log_p.gather(1, listed.ids), 1, dtype=torch.float16)
    tail = 1 - log_p.gather(1, listed.ids).exp().sum(1)
    assert_rounds(listed.tail.exp(), tail, 1, magnitude=1, dtype=torch.float16)
    # and never renormalised
    assert (listed.log_p.exp().sum(1) + listed.tail.exp() - 1).abs().max() < 4e-3


def test_a_seed_orders_the_rows_anew_in_each_epoch(made):
    """Every row comes once an epoch, and a step does not depend on those before it; no seed keeps the order."""

    def rows(seed: int | None, *steps: int) -> list[list[int]]:
        batches = StoredBatches(made, 4, seed=seed)
        return [row for step in steps for row in batches.batch(step).ids.tolist()]

    stored = padded(read_store(made).outputs).ids.tolist()
    assert rows(None, *range(10)) == stored * 2
    orders = [rows(seed, *range(10)) for seed in (0, 1)]
    for seed, seen in enumerate(orders):
        assert sorted(seen[:20]) == sorted(seen[20:]) == sorted(stored)
        assert seen[:20] != seen[20:]
        assert rows(seed, 7) == seen[28:32]
    assert orders[0] != orders[1]


def test_a_killed_build_resumes_to_the_same_bytes(family_dirs, text, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "DISTILL_SHARD", 8)
    target = family_dirs["llama"]
    build_store(target, text, tmp_path / "a")
    arrays, calls = store._arrays, []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 4:  # one for the held-out text, then the third shard
            raise KeyboardInterrupt
        return arrays(*arguments)

    monkeypatch.setattr(store, "_arrays", killed)
    with pytest.raises(KeyboardInterrupt):
        build_store(target, text, tmp_path / "b")
    with pytest.raises(UserError):
        StoredBatches(tmp_path / "b", 2)
    # safetensors' name for a file that it writes
    (tmp_path / "b/heldout/.tmp1a2B3c").write_bytes(b"half")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/.manifest.json.abc123_9.draftlab").write_text("{")
    for name in "bc":
        build_store(target, text, tmp_path / name)
        assert files_of(tmp_path / "a") == files_of(tmp_path / name)
    with raises_option("seed"):
        build_store(target, text, tmp_path / "a", seed=1)


Shard = dict[str, np.ndarray]


def spoilt(made: Path, out: Path, change: Callable[[Shard], object]) -> Path:
    """Return a copy of the cache whose first shard was changed, with a checksum that fits."""
    shard = load_file(made / "shard-00000.safetensors")
    change(shard)
    out.mkdir()
    save_file(shard, out / "shard-00000.safetensors")
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = provenance.file_sha256(out / "shard-00000.safetensors")
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def first(name: str, value: float) -> Callable[[Shard], None]:
    """Change the first value of an array."""
    return lambda shard: shard[name].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "array"),
    [
        (first("prompt_ids", 307), "prompt_ids"),
        (first("rest_logprob", 0.5), "rest_logprob"),
        (lambda shard: shard.pop("token_logprob"), "token_logprob"),
        (first("rest_logprob", 0), "not 1"),
        (first("rest_logprob", np.nan), "rest_logprob"),
        (lambda shard: shard.update(ids=shard["ids"].astype(np.int64)), "ids"),
        (lambda shard: shard.update(ids=shard["ids"].astype(np.float32)), "ids"),
        (lambda shard: shard.update(ids=shard["ids"][:0]), "entries"),
        (lambda shard: shard.update(prompt_ids=shard["prompt_ids"][:-1]), "prompt_ids"),
        (lambda shard: shard.update(number=shard["number"][1:]), "number"),
        (lambda shard: shard.update(offsets=shard["offsets"][::-1].copy()), "ids"),
        (first("offsets", 10**12), "ids"),
        (lambda shard: shard.update(other=shard["ids"]), "other"),
    ],
)
def test_arrays_that_no_target_has_given_are_refused_with_the_right_checksum(change, array, made, tmp_path):
    with raises_option("shard-00000.safetensors", array):
        read_store(spoilt(made, tmp_path / "c", change))


@pytest.mark.parametrize("change", [lambda ids: np.roll(ids, 1), lambda ids: (ids * 7 + 3) % 307])
def test_a_shifted_or_foreign_cache_is_found_without_the_target(change, made, tmp_path):
    changed = spoilt(made, tmp_path / "c", lambda shard: shard.update(ids=change(shard["ids"])))
    with pytest.raises(UserError):
        StoredBatches(changed, 4)


@pytest.mark.parametrize("asked", [{"use": "replay"}, {"top_logprobs": 4}])
def test_a_target_whose_logits_are_not_finite_stores_nothing(asked, family_dirs, text, tmp_path):
    shutil.copytree(family_dirs["llama"], tmp_path / "target")
    negative = {"rope_theta": -1.0, "rope_type": "default"}
    edit(tmp_path / "target/config.json", rope_parameters=negative)
    with pytest.raises(UserError):
        OUTPUTS_BUILD(target=str(tmp_path / "target"), data=text, out=tmp_path / "out", **asked)
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_another_vocabulary_or_temperature_is_refused(made, family_dirs):
    with pytest.raises(UserError):
        open_stored(made, hub.locate("tiny"), batch_size=4, temperature=1.0)
    with pytest.raises(UserError):
        open_stored(made, family_dirs["llama"], batch_size=4, temperature=0.9)


def test_verify_finds_the_target_that_made_it_and_no_other(made, family_dirs, tmp_path):
    assert verify(made, LocalTarget(family_dirs["llama"], CPU)).good
    build("llama", seed=5).save_pretrained(tmp_path)
    copy_tokenizer(family_dirs["llama"], tmp_path)
    assert not verify(made, LocalTarget(tmp_path, CPU)).good


@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_what_is_seen_is_the_targets_own_whatever_the_memory(kind, family_dirs, tokenizer_dir, tmp_path):
    """Any causal language model: the engine's, and one that transformers runs; in one pass, rows and parts of a row."""
    place = family_dirs["llama"] if kind == "llama" else save_neox(tmp_path / kind, tokenizer_dir)
    model = checkpoint.load_model(place, torch.float32).eval()
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(3, 300, (5, 21)), rng.integers(0, 2, (5, 20)).astype(np.float32)
    with torch.no_grad():
        log_p = model(torch.from_numpy(ids[:, :-1])).logits.log_softmax(-1)[torch.from_numpy(mask) > 0]
    came = log_p.gather(1, torch.from_numpy(ids[:, 1:][mask > 0])[:, None])[:, 0]
    for positions in (1000, 45, 7):
        scored = LocalTarget(place, CPU, memory=positions * 16 * 307 / 1e9).score(Batch(ids, mask), 8)
        assert_rounds(scored.logprobs, log_p.topk(8).values)
        assert_rounds(scored.token, came)


STOPS = frozenset(range(0, 307, 20))


@pytest.fixture(scope="module")
def small(family_dirs) -> Iterator[Server]:
    """Yield the small llama on a server that speaks as vLLM does."""
    target = family_dirs["llama"]
    model = checkpoint.load_model(target, torch.float32).eval()
    with running(SmallVLLM(model, checkpoint.load_tokenizer(target), STOPS)) as url:
        yield Server.connect(url)


def same_lists(a: Path, b: Path) -> None:
    """Check that two stores have the same text, and the same lists for every token that counts."""
    for part in ("", "heldout"):
        mine, other = (load_file(place / part / "shard-00000.safetensors") for place in (a, b))
        for name in ("ids", "offsets", "prompt_ids", "prompt_offsets", "number"):
            assert np.array_equal(mine[name], other[name])
        assert (mine["top_ids"] == other["top_ids"]).mean() > 0.99  # ties in fp16 apart
        for name in ("top_logprobs", "token_logprob", "rest_logprob"):
            assert np.abs(mine[name].astype(np.float32) - other[name].astype(np.float32)).max() < 0.01


def test_a_cache_from_a_server_is_that_of_the_target(small, made, family_dirs, text, tmp_path):
    build_store(family_dirs["llama"], text, tmp_path / "c", server=small.http.url)
    same_lists(tmp_path / "c", made)
    manifest = read_manifest(tmp_path / "c")
    assert (manifest.source, manifest.target, manifest.target_sha256) == (
        "vllm 0.32.0",
        "small",
        None,
    )
    assert (manifest.logprobs, manifest.temperatures, manifest.sampling) == ("none", (1.0,), None)
    batches, held = open_stored(tmp_path / "c", family_dirs["llama"], batch_size=4, temperature=1.0)
    assert StoredTeacher(307).distributions(batches.batch(0)).ids.shape == (64, 8)
    assert len(held.batches) == 16
    with pytest.raises(UserError):
        StoredBatches(tmp_path / "c", 4, 0.8)


def test_another_tokenizer_on_the_server_is_found(small):
    with pytest.raises(UserError):
        ServedTarget.connected(small, hub.locate("tiny"), None, 8)


@pytest.mark.parametrize("temperature", [0.7, None])
def test_a_server_is_probed_before_anything_is_built(temperature):
    def probed(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/tokenize":
            return 404, {"detail": "Not Found"}
        if method == "POST":  # what was recorded after another prompt
            body = body | {"prompt": [0, 309, 293, 653, 570, 346, 546]}
        return replay("processed_logprobs")(method, path, body)

    # log-probabilities of given text are raw
    sampling = None if temperature is None else SamplingParams(temperature=temperature)
    refused = contextlib.nullcontext() if sampling is None else pytest.raises(UserError)
    with running(probed) as url, refused:
        target = ServedTarget.connected(Server.connect(url), hub.locate("tiny"), sampling, 8)
        assert target.probe.logprobs_mode == "processed_logprobs"


def test_a_served_teacher_looks_as_the_target_itself(small, made, family_dirs):
    batch = replace(StoredBatches(made, 4).batch(0), top_logprobs=None)
    batch = Batch(batch.ids, batch.mask * (np.arange(16) > 4) * (np.arange(16) < 13))
    batch.mask[2] = 0  # a row of which nothing counts
    listed = ServedTeacher(small, 8, 307).distributions(batch)
    log_p = whole(family_dirs["llama"], batch)
    assert listed.ids.shape == (3 * 8, 8)
    assert_rounds(listed.log_p, log_p.topk(8).values)
    tail = 1 - log_p.gather(1, listed.ids).exp().sum(1)
    assert_rounds(listed.tail.exp(), tail)
    nothing = ServedTeacher(small, 8, 307).distributions(Batch(batch.ids, np.zeros_like(batch.mask)))
    assert nothing.ids.shape == (0, 8)


def test_a_token_beyond_the_drafts_vocabulary_is_refused(small, made):
    batch = replace(StoredBatches(made, 4).batch(0), top_logprobs=None)
    with pytest.raises(UserError):
        ServedTeacher(small, 8, 200).distributions(batch)


@pytest.fixture(scope="module")
def log(small, tmp_path_factory) -> Path:
    """Return what a server's log holds of 26 requests, some longer and some shorter than 16 tokens."""
    prompts = [[0, 10 + i, 40 + i, 100 + i][: 2 + i % 3] for i in range(26)]
    written = [
        small.generate([p], SamplingParams(max_tokens=6 + i, seed=i, temperature=1.0), k=8)[0]
        for i, p in enumerate(prompts)
    ]
    file = tmp_path_factory.mktemp("log") / "day.jsonl"
    file.write_text("".join(w.as_json() + "\n" for w in written))
    return file


def test_traffic_is_kept_as_the_target_would_score_it(log, family_dirs, tokenizer_dir, tmp_path):
    """A tokenizer is all that it needs of the target."""
    target = family_dirs["llama"]
    assert ServerLog.open(log, vocab=307, seq_len=16, top_logprobs=64).top_logprobs == 8
    OUTPUTS_BUILD(from_file=log, target=str(tokenizer_dir), seq_len=16, out=tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    assert (manifest.source, manifest.text, manifest.sequences) == ("log", "target", 24)
    batches, held = open_stored(tmp_path / "c", target, batch_size=24, temperature=1.0)
    batch = batches.batch(0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # a prompt is that of a single line here, and a hash of it decides which lines are held out
    apart = [first for held_out in held.batches for first in held_out.ids[:, 1].tolist()]
    assert len(apart) == 2
    lines = [line for line in lines if line["prompt_ids"][1] not in apart]
    for row, mask, line in zip(batch.ids, batch.mask, lines, strict=True):
        text, prompt = (line["prompt_ids"] + line["ids"])[:17], len(line["prompt_ids"])
        assert row.tolist() == text + [0] * (17 - len(text))
        assert np.flatnonzero(mask).tolist() == list(range(prompt - 1, len(text) - 1))
    listed = StoredTeacher(307).distributions(batch)
    log_p = whole(target, replace(batch, top_logprobs=None))
    assert_rounds(listed.log_p, log_p.topk(8).values, 1, dtype=torch.float16)
    assert verify(tmp_path / "c", LocalTarget(target, CPU)).good


LINE = {
    "prompt_ids": [0, 5],
    "ids": [7, 8],
    "top_ids": [[7, 9], [1, 8]],
    "logprobs": [-0.5, -2.0],
} | {"top_logprobs": [[-0.5, -1.5], [-0.4, -2.0]]}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        {k: v for k, v in LINE.items() if k != "ids"},
        LINE | {"ids": [7]},
        LINE | {"top_ids": [[7, 7], [1, 8]]},
        LINE | {"prompt_ids": [307]},
        '{"prompt_ids":[0],"ids":[7],"top_ids":[[7]],"top_logprobs":[[NaN]],"logprobs":[-1]}',
        LINE | {"top_logprobs": [[-0.5, -0.5], [-0.4, -2.0]]},  # probabilities that sum to 1.213
        LINE | {"logprobs": [-0.5, -1.0]},  # the list says -2.0
        LINE | {"ids": [6, 8]},  # less probable than a token outside of the list can be
    ],
)
def test_a_bad_line_of_traffic_is_left_out_and_named(line, tmp_path, capsys):
    file, good = tmp_path / "log.jsonl", json.dumps(LINE)
    bad = line if isinstance(line, str) else json.dumps(line)
    file.write_text("\n".join([good, "", good, bad, good, ""]))
    log = ServerLog.open(file, vocab=307, seq_len=16, top_logprobs=8)
    assert len(log.starts) == 3
    assert "log.jsonl:4" in capsys.readouterr().err
    file.write_text("\n".join([good, bad, good, bad, ""]))
    with raises_option("2 of 4", "log.jsonl:2", "log.jsonl:4"):
        ServerLog.open(file, vocab=307, seq_len=16, top_logprobs=8)


def test_lists_are_sorted_and_cut_to_what_every_line_has(tmp_path, family_dirs):
    longer = LINE | {
        "top_ids": [[9, 7, 3], [8, 1]],
        "top_logprobs": [[-1.5, -0.5, -4.0], [-2.0, -0.4]],
    }
    file = write_rows(tmp_path / "log.jsonl", [longer, LINE])
    (output,) = ServerLog.open(file, vocab=307, seq_len=4, top_logprobs=3).outputs([0])
    assert (output.prompt.tolist(), output.ids.tolist()) == ([0, 5], [7, 8])
    assert output.top.ids.tolist() == [[7, 9], [1, 8]]
    assert output.top.rest[0] == pytest.approx(np.log(1 - np.exp(-0.5) - np.exp(-1.5)), abs=1e-5)


@pytest.fixture
def space(family_dirs, text, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workspace(family_dirs["llama"], text)
    return tmp_path


FEW: dict[str, Any] = {"num_sequences": 4, "seq_len": 12, "top_logprobs": 4}


def test_the_commands_build_and_verify_from_a_server(space, small):
    url = small.http.url
    made = OUTPUTS_BUILD(server=url, **FEW)
    assert (made.path, made.data["source"]) == (Path("runs/outputs-distill-llama"), "vllm 0.32.0")
    record = provenance.read_record(made.path)
    assert record.notes["server"] == {"kind": "vllm", "version": "0.32.0", "model": "small"}
    for given in ({"server": url}, {}):
        assert OUTPUTS_INFO(directory=made.path, verify=True, **given).missed == []


def test_an_int8_target_writes_its_own_answers(family_dirs, tmp_path):
    target = family_dirs["llama"]
    given = {"target": str(target), "prompt_file": write_prompts(tmp_path / "prompts.jsonl", 12)}
    asked = given | {"max_new_tokens": 8, "temperature": 0.0, "top_logprobs": 8}
    OUTPUTS_BUILD(**asked, out=tmp_path / "store", int8=True)
    model = NativeLlama(llama.load(target, torch.float32), int8=True)
    for output in read_store(tmp_path / "store").outputs:
        ids = torch.from_numpy(np.concatenate([output.prompt, output.ids]).astype(np.int64))
        said = model.forward_uncached(ids[None, :-1], len(output.ids))[0].argmax(-1)
        assert said.tolist() == output.ids.tolist()
    assert read_manifest(tmp_path / "store").dtype == "int8"
    asked = {"directory": tmp_path / "store", "target": str(target), "verify": True}
    assert OUTPUTS_INFO(**asked).missed == []
    with raises_option("--int8"):
        OUTPUTS_BUILD(**given, out=tmp_path / "other", int8=True, device_map="auto")
