"""A trace says what the target wrote, and a replay over it is the draft at work; what is wrong with either is said."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds, build, generation_of
from helpers.errors import raises_option
from helpers.loopback_servers import SmallVLLM, running
from helpers.small_files import copy_tokenizer, edit, write_functions, write_rows, write_workspace
from helpers.typed import call
from safetensors.numpy import load_file, save_file
from transformers import TopKLogitsWarper, TopPLogitsWarper

from draftlab.commands import OUTPUTS_BUILD
from draftlab.config.server_rules import DecodingRule
from draftlab.data.prompts import file_prompts
from draftlab.drafters.base import parse_drafter
from draftlab.drafters.lookup import LatestLookupDrafter
from draftlab.engine.generate import ModelDrafter, decode, speculative_decode
from draftlab.errors import UserError
from draftlab.latency.steps import steps
from draftlab.model import checkpoint
from draftlab.model.llama import load
from draftlab.runs import provenance
from draftlab.sampling import SamplingParams
from draftlab.scoring.replay import Drafting, check, drafter_of, read_replay, replay_draft, rows_of, workload_of_replay
from draftlab.target_outputs import build as building
from draftlab.target_outputs.batches import open_stored
from draftlab.target_outputs.outputs import TEMPERATURES
from draftlab.target_outputs.store import StoredOutputs, read_shard, read_store
from draftlab.target_outputs.targets import LocalTarget

CPU = torch.device("cpu")
GREEDY_DRAFT = DecodingRule("rejection", draft=())
LINES = [
    {"prompt": "def parse(line):\n    if not line:", "category": "code"},
    {"question_id": 7, "category": "chat", "turns": ["class Reader:"]},
    {"prompt": "return", "category": "code"},
    {"text": "return [int(part) for part in line.split(',')]"},
    {"prompt": "def read(self):\n        return 1", "category": "chat"},
    {"prompt": "if not line:", "category": "code"},
    {"prompt": "if not part:", "category": "code"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer_dir) -> dict[str, Path]:
    """Return a target that is sure now and then, and the same with noise as its draft."""
    root = tmp_path_factory.mktemp("models")
    made = {"target": build("llama", 1), "draft": build("llama", 1)}
    torch.manual_seed(5)
    with torch.no_grad():
        for p in made["draft"].parameters():
            p.add_(torch.randn_like(p) * 0.002)
        for name, model in made.items():
            model.get_output_embeddings().get_parameter("weight").mul_(12)
            model.save_pretrained(root / name)
            copy_tokenizer(tokenizer_dir, root / name)
    return {name: root / name for name in made}


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", LINES)


def recorded(out: Path, target: Path, prompts: Path, **changes: Any) -> StoredOutputs:
    """Answers of at most 24 tokens, greedy, in float32."""
    settings = {"use": "replay", "target": str(target), "prompt_file": prompts, "out": out}
    settings |= {} if "server" in changes else {"dtype": "float32"}
    OUTPUTS_BUILD(**settings | {"max_new_tokens": 24} | changes)
    return read_store(out)


@pytest.fixture(scope="module")
def greedy_store(tmp_path_factory, models, prompt_file) -> StoredOutputs:
    out = tmp_path_factory.mktemp("stores") / "greedy"
    return recorded(out, models["target"], prompt_file, top_logprobs=3)


def drafting(**changes: Any) -> Drafting:
    plain = Drafting(k=8, rule=DecodingRule("rejection"), dtype=torch.float32, device=CPU)
    return replace(plain, **changes)


@pytest.fixture
def ends(models, greedy_store, tmp_path) -> tuple[int, Path]:
    """Return a token, and the target whose texts end with it."""
    token = int(greedy_store.outputs[0].ids[9])
    shutil.copytree(models["target"], tmp_path / "target")
    edit(tmp_path / "target/config.json", eos_token_id=token)
    return token, tmp_path / "target"


# recording


def test_a_greedy_store_is_plain_decoding_of_whole_prompts(models, greedy_store):
    model = load(models["target"], torch.float32)
    tokenizer = checkpoint.load_tokenizer(models["target"])
    texts = ["def parse(line):\n    if not line:", "class Reader:", "return", LINES[3]["text"]]
    assert len(greedy_store.outputs) == len(LINES)
    for text, prompt in zip(greedy_store.outputs, texts, strict=False):
        assert text.prompt.tolist() == tokenizer(prompt)["input_ids"]
        steps = decode(model, [text.prompt.tolist()], SamplingParams(max_tokens=24))
        assert text.ids.tolist() == [t for step in steps for t in step.tokens]
        assert (text.finish_reason, text.logprobs.tolist()) == ("length", [0.0] * 24)
        assert text.top.ids[:, 0].tolist() == text.ids.tolist()
        assert text.top.logprobs.shape == (24, 3)
    categories = [t.category for t in greedy_store.outputs]
    assert categories == [line.get("category", "") for line in LINES]
    assert [t.number for t in greedy_store.outputs] == list(range(7))


def test_sampled_text_has_the_log_probability_that_it_was_drawn_with(tmp_path, models, prompt_file):
    cuts = SamplingParams(temperature=5.0, top_k=40, top_p=0.9, seed=3, max_tokens=24)
    prompts = file_prompts(prompt_file, checkpoint.load_tokenizer(models["target"])).rows
    target = LocalTarget(models["target"], CPU, torch.float32)
    written = target.generate(prompts, range(len(prompts)), cuts, 0)
    model = checkpoint.load_model(models["target"], torch.float32).eval()
    for text in written:
        ids = torch.from_numpy(np.concatenate([text.prompt, text.ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(text.prompt) - 1 : -1] / 5.0
        warped = TopPLogitsWarper(0.9)(ids, TopKLogitsWarper(40)(ids, logits))  # type: ignore[arg-type]
        wanted = warped.log_softmax(-1).gather(1, ids[0, len(text.prompt) :, None]).squeeze(1)
        assert_rounds(text.logprobs, wanted)
        assert text.logprobs.max() < 0


def test_lists_are_those_of_transformers_in_batches_whose_texts_end_at_different_lengths(models, prompt_file):
    cuts = SamplingParams(temperature=1.5, top_k=40, seed=3, max_tokens=24, stop_token_ids=tuple(range(0, 307, 9)))
    prompts = file_prompts(prompt_file, checkpoint.load_tokenizer(models["target"])).rows
    target = LocalTarget(models["target"], CPU, torch.float32, batch_size=4)
    written = target.generate(prompts, range(len(prompts)), cuts, 8)
    assert len({len(text.ids) for text in written}) > 2
    model = checkpoint.load_model(models["target"], torch.float32).eval()
    for text in written:
        ids = torch.from_numpy(np.concatenate([text.prompt, text.ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(text.prompt) - 1 : -1]
        log_p = logits.log_softmax(-1)
        top = text.top
        assert top is not None
        assert_rounds(top.logprobs, log_p.topk(8).values)
        assert_rounds(np.take_along_axis(log_p.numpy(), top.ids, 1), top.logprobs)
        tokens = torch.from_numpy(text.ids.astype(np.int64))[:, None]
        assert_rounds(top.token, log_p.gather(1, tokens)[:, 0])
        rest = log_p.sort(descending=True).values[:, 8:].logsumexp(-1)
        assert_rounds(top.rest, rest, magnitude=float(log_p.abs().max()))
        softened = [(log_p / t).logsumexp(-1) for t in TEMPERATURES]
        assert_rounds(top.normalizers, torch.stack(softened, 1))


def test_answers_to_distil_from_are_those_to_replay_and_some_are_held_out(tmp_path, models):
    texts = ({"prompt": f"def f{i}(x):\n" + i % 3 * "    pass\n"} for i in range(20))
    prompts = write_rows(tmp_path / "prompts.jsonl", texts)
    settings = {"temperature": 1.0, "top_logprobs": 3}
    to_replay = recorded(tmp_path / "replay", models["target"], prompts, **settings)
    replayed = {output.number: output for output in to_replay.outputs}
    store = recorded(tmp_path / "distill", models["target"], prompts, use="distill", **settings)
    heldout = read_store(tmp_path / "distill" / "heldout")
    numbers = [[o.number for o in outputs] for outputs in (store.outputs, heldout.outputs)]
    assert (len(numbers[1]), sorted(numbers[0] + numbers[1])) == (2, list(range(20)))
    for output in (*store.outputs, *heldout.outputs):
        assert output.ids.tolist() == replayed[output.number].ids.tolist()
        assert output.prompt.tolist() == replayed[output.number].prompt.tolist()
    batches, _ = open_stored(tmp_path / "distill", models["target"], batch_size=4, temperature=1.0)
    assert batches.batch(0).mask.sum() == sum(
        len(o.ids) for o in read_shard(tmp_path / "distill", store.manifest, 0)[:4]
    )
    with pytest.raises(UserError):
        recorded(tmp_path / "few", models["target"], prompts, use="distill", num_prompts=9)


def test_what_is_sampled_depends_on_the_prompt_and_the_seed_alone(tmp_path, models, prompt_file, monkeypatch):
    def texts(name: str, file: Path = prompt_file, **changes: int) -> list[list[int]]:
        settings = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12} | changes
        store = recorded(tmp_path / name, models["target"], file, **settings)
        return [t.ids.tolist() for t in store.outputs]

    together = texts("together")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(prompt_file.read_text().splitlines(keepends=True)[:2]))
    assert texts("few", few) == together[:2]
    assert texts("other", seed=4) != together
    monkeypatch.setattr(building, "REPLAY_BATCH", 1)
    assert texts("one by one") == together


def test_text_ends_with_the_first_end_of_text_and_keeps_it(tmp_path, prompt_file, greedy_store, ends):
    end, target = ends
    found = recorded(tmp_path / "t", target, prompt_file)
    for text, whole in zip(found.outputs, greedy_store.outputs, strict=True):
        at = whole.ids.tolist().index(end) + 1 if end in whole.ids else 24
        assert text.ids.tolist() == whole.ids[:at].tolist()
        assert text.finish_reason == ("stop" if end in whole.ids else "length")
    assert {t.finish_reason for t in found.outputs} >= {"stop"}


def test_a_server_records_what_the_target_in_memory_does(tmp_path, prompt_file, ends):
    end, target = ends
    local = recorded(tmp_path / "local", target, prompt_file, top_logprobs=3)
    model = checkpoint.load_model(target, torch.float32).eval()
    server = SmallVLLM(model, checkpoint.load_tokenizer(target), frozenset({end}))
    with running(server) as url:
        found = recorded(tmp_path / "served", target, prompt_file, top_logprobs=3, server=url)
    assert (found.manifest.source, found.manifest.logprobs) == ("vllm 0.32.0", "raw")
    for a, b in zip(found.outputs, local.outputs, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert (a.finish_reason, a.category) == (b.finish_reason, b.category)
        assert a.logprobs.tolist() == [0.0] * len(a.ids)
        assert a.top.ids.tolist() == b.top.ids.tolist()
        assert_rounds(a.top.logprobs, b.top.logprobs, 1, dtype=torch.float16)  # as stored


# files that are not what they should be


def test_every_damage_to_a_shard_is_found(tmp_path, greedy_store):
    shutil.copytree(greedy_store.directory, tmp_path / "t")
    file = tmp_path / "t/shard-00000.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(UserError):
            read_store(tmp_path / "t")


@pytest.mark.parametrize(
    ("array", "place", "changes"),
    [
        ("offsets", 1, {}),
        ("stopped", 0, {"sampling": {"max_tokens": 25}}),
        ("number", 0, {"sampling": {"top_k": -1}}),
        ("number", 0, {"sampling": {"temperature": -1.0}}),
    ],
)
def test_texts_that_contradict_their_manifest_are_refused(array, place, changes, tmp_path, greedy_store):
    shutil.copytree(greedy_store.directory, tmp_path / "t")
    file = tmp_path / "t/shard-00000.safetensors"
    arrays = load_file(file)
    arrays[array][place] += array == "offsets"
    save_file(arrays, file)
    manifest = json.loads((tmp_path / "t/manifest.json").read_text())
    manifest["shards"][0]["sha256"] = provenance.file_sha256(file)
    sampling = manifest["sampling"] | changes.get("sampling", {})
    edit(tmp_path / "t/manifest.json", **manifest | changes | {"sampling": sampling})
    with pytest.raises(UserError):
        read_store(tmp_path / "t")


def test_prompts_are_cut_only_where_they_are_long_enough(prompt_file, models):
    reader = checkpoint.load_tokenizer(models["target"])
    cut = file_prompts(prompt_file, reader, count=1, tokens=4)
    assert cut.rows[0].ids == file_prompts(prompt_file, reader, count=1).rows[0].ids[:4]
    with raises_option("--prompt-tokens"):
        file_prompts(prompt_file, reader, tokens=8)


# replaying


def test_sampled_chances_are_the_ratio_of_what_both_sampled_from(tmp_path, models, prompt_file):
    target = models["target"]
    found = recorded(tmp_path / "t", target, prompt_file, temperature=4.0, seed=1)
    ratio = replay_draft(found, drafter_of(models["draft"]), drafting())
    match = replay_draft(found, drafter_of(models["draft"]), drafting(rule=DecodingRule("match")))
    sharp = replay_draft(found, drafter_of(models["draft"]), drafting(rule=GREEDY_DRAFT))
    for text, a, b, c in zip(found.outputs, ratio.texts, match.texts, sharp.texts, strict=True):
        wanted = np.minimum(1, np.array(b.chances) / np.exp(text.logprobs))
        # a ratio of probabilities has the relative error of their logarithms
        assert_rounds(a.chances, wanted, magnitude=float(np.abs(text.logprobs).max()))
        assert set(c.chances) <= {0.0, 1.0}
    same = replay_draft(found, drafter_of(target), drafting())
    # a draft that is the target
    chances = np.concatenate(same.chances())
    largest = max(float(np.abs(text.logprobs).max()) for text in found.outputs)
    assert_rounds(chances, np.ones_like(chances), magnitude=largest)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("k", [1, 3])
def test_a_replayed_lookup_counts_what_decoding_along_the_text_counts(tmp_path, models, prompt_file, temperature, k):
    """A lookup is certain of its tokens, so the text decides every step, sampled or not."""
    store = recorded(tmp_path / "store", models["target"], prompt_file, temperature=temperature)
    spec = parse_drafter("latest-lookup:prompt_lookup_max=2")
    replayed = replay_draft(store, spec, drafting(target=models["target"]))
    counts, drafter, drafts = replayed.counts(k), LatestLookupDrafter(2), 0
    for row, output in enumerate(store.outputs):
        ids, prompt = output.ids.tolist(), output.prompt.tolist()
        limit = len(ids) if output.finish_reason == "length" else 24
        at, passes, steps, drafted, accepted = 1, 0, 0, 0, 0
        while at < len(ids):
            draft = drafter.draft(prompt + ids[:at], min(k, limit - at - 1)) if limit > at + 1 else []
            right = [a == b for a, b in zip(draft, ids[at:], strict=False)]
            run = right.index(False) if False in right else len(right)
            passes, steps, drafted = passes + 1, steps + bool(draft), drafted + len(draft)
            at, accepted = at + run + 1, accepted + run
        found = (counts.passes, counts.steps, counts.drafted, counts.accepted)
        assert tuple(each[row] for each in found) == (passes, steps, drafted, accepted)
        drafts += accepted
    assert drafts  # else nothing was compared


def test_the_engine_counts_the_steps_of_a_replayed_lookup(models, greedy_store):
    target = load(models["target"], torch.float32)
    spec = parse_drafter("latest-lookup:prompt_lookup_max=2")
    replayed = replay_draft(greedy_store, spec, drafting(target=models["target"]))
    ends = tuple(checkpoint.eos_token_ids(models["target"]))
    greedy = SamplingParams(max_tokens=24, stop_token_ids=ends)
    for k in (1, 4):
        counts = replayed.counts(k)
        for row, output in enumerate(greedy_store.outputs):
            prompts = [output.prompt.tolist()]
            steps = list(speculative_decode(target, LatestLookupDrafter(2), prompts, k, greedy))[1:]
            assert counts.passes[row] == len(steps)
            assert counts.accepted[row] == sum(step.accepted for step in steps)
            assert counts.drafted[row] == sum(step.drafted for step in steps)


def test_a_replay_of_drafts_that_depend_on_k_is_read_back(tmp_path, models, greedy_store):
    asked = drafting(k=3, target=models["target"], draft=models["draft"])
    for text in ("suffix", "fallback"):
        found = replay_draft(greedy_store, parse_drafter(text), asked)
        (tmp_path / "replay.json").write_text(found.model_dump_json())
        read = read_replay(tmp_path)
        assert read == found
        for k in (1, 2, 3):
            assert read.counts(k).accepted.tolist() == found.counts(k).accepted.tolist()
        work = workload_of_replay(read)
        assert (work.texts.modelled is not None) == (text == "fallback")
        assert np.allclose(steps(work, 2).starts, found.counts(2).starts)


def test_text_that_ends_early_leaves_room_for_drafts_behind_its_end(tmp_path, models, prompt_file, ends):
    found = recorded(tmp_path / "t", ends[1], prompt_file)
    k = 4
    counts = replay_draft(found, drafter_of(models["draft"]), drafting()).counts(k)
    how = SamplingParams(max_tokens=24, stop_token_ids=ends[:1])
    target, draft = (load(models[name], torch.float32) for name in ("target", "draft"))
    runs = [
        generation_of(speculative_decode(target, ModelDrafter(draft), [o.prompt.tolist()], k, how))
        for o in found.outputs
    ]
    assert counts.passes.tolist() == [len(g.drafted) for g in runs]
    assert counts.drafted.tolist() == [sum(g.drafted) for g in runs]
    accepted = [sum(min(a, e) for a, e in zip(g.accepted, g.emitted, strict=True)) for g in runs]
    assert counts.accepted.tolist() == accepted


def test_a_replay_is_read_back_as_it_was_and_nothing_else_is(tmp_path, models, greedy_store):
    found = replay_draft(greedy_store, drafter_of(models["draft"]), drafting())
    (tmp_path / "replay.json").write_text(found.model_dump_json())
    assert read_replay(tmp_path) == found == read_replay(tmp_path / "replay.json")
    for wrong in (
        {"texts": [found.texts[0].model_copy(update={"chances": [1.5] * 24})]},
        {"sampling": replace(found.sampling, top_k=-1)},
    ):
        (tmp_path / "replay.json").write_text(found.model_copy(update=wrong).model_dump_json())
        with pytest.raises(UserError):
            read_replay(tmp_path)


def test_rows_of_categories_are_their_texts_alone(models, greedy_store):
    found = replay_draft(greedy_store, drafter_of(models["draft"]), drafting())
    rows = rows_of(found, [2, 4])
    assert [(r.group, r.texts, r.k) for r in rows[:2]] == [("all", 7, 2), ("all", 7, 4)]
    by_group = {r.group: r for r in rows[2:]}
    assert by_group["code"].texts == 4
    code = replace(greedy_store, outputs=[o for o in greedy_store.outputs if o.category == "code"])
    alone = replay_draft(code, drafter_of(models["draft"]), drafting())
    assert by_group["code"].acceptance == alone.counts(4).acceptance()
    for row in rows:
        assert row.length.value == pytest.approx(row.acceptance.mean_acceptance_length)
        assert row.rate.value == pytest.approx(row.acceptance.draft_acceptance_rate)
        assert [c.value for c in row.conditional] == pytest.approx(row.acceptance.conditional_acceptance)
        assert row.length.low <= row.length.value <= row.length.high
    if found.degenerate.any():
        assert by_group["without loops"].texts == int((~found.degenerate).sum())


def test_log_probabilities_that_the_rule_cannot_use_are_refused(tmp_path, models, prompt_file):
    found = recorded(tmp_path / "t", models["target"], prompt_file, temperature=0.7)
    draft, manifest = drafter_of(models["draft"]), found.manifest.model_copy
    raw = replace(found, manifest=manifest(update={"logprobs": "raw"}))
    with raises_option("--rule"):
        check(raw, draft, drafting())
    check(raw, draft, drafting(rule=DecodingRule("match")))
    check(raw, draft, drafting(rule=GREEDY_DRAFT))
    at_one = {"logprobs": "raw", "sampling": replace(found.manifest.sampling, temperature=1.0)}
    check(replace(found, manifest=manifest(update=at_one)), draft, drafting())


def test_text_that_the_target_did_not_write_is_not_replayed(tmp_path, models):
    """Nor is text of which nobody knows how it was sampled."""
    asked = {"target": str(models["target"]), "data": write_functions(tmp_path / "text.txt")}
    asked |= {"num_sequences": 4, "seq_len": 16, "top_logprobs": 4}
    draft = drafter_of(models["draft"])
    OUTPUTS_BUILD(**asked, out=tmp_path / "data")
    with pytest.raises(UserError):
        check(read_store(tmp_path / "data"), draft, drafting())
    OUTPUTS_BUILD(**asked, text="target", prompt_tokens=4, out=tmp_path / "w")
    written = read_store(tmp_path / "w")
    check(written, draft, drafting())
    nobody = replace(written, manifest=written.manifest.model_copy(update={"sampling": None}))
    with pytest.raises(UserError):
        check(nobody, draft, drafting())


def test_outputs_that_lack_what_distilling_needs_are_refused(tmp_path, models, greedy_store, prompt_file):
    with pytest.raises(UserError):
        open_stored(greedy_store.directory, models["draft"], batch_size=2, temperature=1.0)
    recorded(tmp_path / "t", models["target"], prompt_file)
    with pytest.raises(UserError):
        open_stored(tmp_path / "t", models["draft"], batch_size=2, temperature=1.0)


# loops


# the command line


@pytest.fixture
def space(tmp_path, monkeypatch, models) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workspace(models["target"])
    return tmp_path


def test_build_info_and_replay_as_typed(space, models, prompt_file):
    call("outputs build --use replay --prompt-file", prompt_file, "--max-new-tokens", 20)
    facts = json.loads(call("outputs info runs/outputs-replay-target --json").stdout)
    assert facts["categories"] == {"chat": 2, "code": 4}
    replay = ("replay runs/outputs-replay-target --draft", models["draft"])
    rows = json.loads(call(*replay, "--k", "2", "--json").stdout)
    assert (space / "runs/replay-target/draft/replay.json").is_file()
    (row, *_) = rows["replays"][0]["rows"]
    assert (row["texts"], row["num_speculative_tokens"]) == (7, 2)
    shown = call(*replay, "--k", "1-8", "--force").stdout  # 80 columns
    assert re.search("^chat +2 +8 ", shown, re.M)


def test_replay_takes_the_target_from_the_store_and_the_draft_from_draft(space, models, prompt_file):
    """The workspace may have another target by now. If the target was moved, --target names it."""
    here = shutil.copytree(models["target"], space / "here")
    build = "outputs build --use replay --max-new-tokens 12 --out answers --prompt-file"
    call(build, prompt_file, "--target", here)
    write_workspace(models["draft"])
    draft = ("--draft", models["draft"], "--k", 2)
    call("replay answers --drafter fallback --drafter latest-lookup --out replayed", *draft)
    assert {path.name for path in (space / "replayed").iterdir() if path.is_dir()} == {
        "draft",
        "fallback",
        "latest-lookup",
    }
    named = f"replay answers --drafter fallback:draft={models['draft']} --k 2 --out named"
    call(named)
    (alone,) = (space / "named").glob("*/replay.json")
    assert read_replay(alone).texts == read_replay(space / "replayed/fallback").texts
    shutil.move(here, space / "there")
    lookup = "replay answers --drafter latest-lookup --out moved"
    assert "--target" in call(lookup, code=1).stderr
    call(lookup, "--target", "there")
