"""Every reader of files from outside, with a good file of its kind: what the fuzzer damages."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from builders import TOKENIZER_TEXT, build
from peft import LoraConfig, get_peft_model
from pydantic import BaseModel
from test_report import score
from test_sentencepiece import train_sentencepiece

from benchmarks.tiny_target import train_tokenizer
from draftlab import provenance, turns, workspace
from draftlab.atomic import STATE_RECORD, claim_state
from draftlab.config.prune import PruneConfig
from draftlab.data.sources import documents
from draftlab.exporting import gguf as gguf_writer
from draftlab.importing import gguf
from draftlab.importing.run import _stored_dtype, inspect, load
from draftlab.intervals import Interval
from draftlab.latency.cost_model import Point, Profile, SteadyPoint, read_profile, write_profile
from draftlab.latency.k_schedule import Schedule, read_schedule
from draftlab.latency.roofline import read_device
from draftlab.model import checkpoint, eagle, hub
from draftlab.model.checkpoint import Weights
from draftlab.model.families import widths_folder
from draftlab.model.hf_files import check_causal, eos_ids, read_head_ids, write_head_ids
from draftlab.model.shape import Shape, read_shape_file, write_shape_file
from draftlab.prompts import file_prompts
from draftlab.pruning.importance import Importance, load_scores, save_scores
from draftlab.reading import read_model
from draftlab.recipe import read_recipe
from draftlab.results.decoding import ServedGeneration
from draftlab.results.ranking import read_candidates
from draftlab.results.score import Latency, read_score
from draftlab.sampling import SamplingParams
from draftlab.scoring.servers import PlainAnswers
from draftlab.searching.costs import Machine
from draftlab.searching.plan import Plan, PlannedStep
from draftlab.searching.schedule import Rung, Search, ShapeTrial, read_search
from draftlab.target_outputs.outputs import StoredLogprobs, TargetOutput
from draftlab.target_outputs.replay import Replay, ReplayedText, read_replay
from draftlab.target_outputs.server_log import ServerLog
from draftlab.target_outputs.store import Manifest, read_store, vocabulary_sha256, write_store
from draftlab.training.checkpointer import CONTENT, save
from draftlab.training.checkpointer import load as load_state
from draftlab.training.run import read_log

SHAPE = Shape(layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=24, vocab=307)
VOCAB = 307
CLAIM = {"command": "distill", "lr": 0.001, "inputs": ["x"], "steps": 20}


@dataclass(frozen=True, slots=True)
class Reader:
    """One way in which a file is read. kind: of its content, as damage.py has it.

    read: takes the file. checksum: any other content is damage.
    """

    name: str
    file: Path
    kind: str
    read: Callable[[Path], Any]
    checksum: bool = False


def readers(root: Path) -> list[Reader]:
    """Write a good file of every kind below root, and return what reads it."""
    model = _model(root / "model")
    sharded = root / "sharded"
    build("llama", num_hidden_layers=2).save_pretrained(sharded, max_shard_size="60KB")
    _texts(root)
    _records(root)
    store = _store(root / "store", model)
    head = _head(root, model)
    step = _unfinished(root / ".run.state")
    gguf_writer.write(model, root / "draft.gguf", "f32")
    (root / "pickled").mkdir()
    torch.save({"a.weight": torch.ones(3, 4), "b.weight": torch.ones(2)}, root / "pickled/pytorch_model.bin")
    importance = Importance(**{name: torch.rand(3, 4) for name in Importance.__slots__})
    save_scores(importance, root / "importance.safetensors", {"source": "x"})
    tokenizer = checkpoint.load_tokenizer(model)
    adapter = _adapter(root / "adapter", model)
    (root / "sentencepiece").mkdir()
    train_sentencepiece(root / "sentencepiece")

    def imported(file: Path) -> Any:
        source = inspect(str(file), None, None)
        assert source.header is not None
        return dict(load(source).state_dict()), sorted(gguf.load_tokenizer(source.header, 64).get_vocab().items())

    def merged(file: Path) -> Any:
        return dict(load(inspect(str(file.parent), None, str(model))).state_dict())

    def encoded(file: Path) -> Any:
        loaded = checkpoint.load_tokenizer(file.parent)
        return sorted(loaded.get_vocab().items()), loaded(TOKENIZER_TEXT[0])["input_ids"]

    def weights(file: Path) -> Any:
        checkpoint.check(file.parent)
        return dict(Weights(file.parent))

    def configured(file: Path) -> Any:
        check_causal(file.parent)
        checkpoint.check(file.parent)
        return checkpoint.read_config(file.parent), checkpoint.vocab_size(file.parent), eos_ids(file.parent)

    def claimed(file: Path) -> Any:
        claim_state(file.parent, CLAIM)

    def logged(file: Path) -> Any:
        log = ServerLog.open(file, vocab=VOCAB, seq_len=16, top_logprobs=2)
        return log.outputs(range(len(log.starts)))

    return [
        Reader("config.json", model / "config.json", "json", configured),
        Reader("generation_config.json", model / "generation_config.json", "json", lambda f: eos_ids(f.parent)),
        Reader("model.safetensors", model / "model.safetensors", "tensors", weights),
        Reader("index", sharded / hub.INDEX, "json", weights),
        Reader("shard", next(sharded.glob("*-00001-*")), "tensors", weights),
        Reader("tokenizer.json", model / "tokenizer.json", "json", encoded),
        Reader("tokenizer_config.json", model / "tokenizer_config.json", "json", encoded),
        Reader("head_ids.json", model / "head_ids.json", "json", lambda f: read_head_ids(f.parent, VOCAB)),
        Reader("EAGLE-3 config", head / "config.json", "json", lambda f: eagle.read(f.parent, model, torch.float32)),
        Reader("EAGLE-3 head", head / eagle.WEIGHTS, "tensors", lambda f: eagle.read(f.parent, model, torch.float32)),
        Reader("GGUF", root / "draft.gguf", "binary", lambda f: gguf.describe(gguf.read_header(f))),
        Reader("GGUF whole", root / "draft.gguf", "binary", imported),
        Reader("adapter_config", adapter / "adapter_config.json", "json", merged),
        Reader("adapter", adapter / "adapter_model.safetensors", "tensors", merged),
        Reader("tokenizer.model", root / "sentencepiece/tokenizer.model", "binary", encoded),
        Reader("prediction", root / "prediction.json", "json", lambda f: read_schedule(f, "d", "0")),
        Reader(
            "prediction again", root / "prediction.json", "json", lambda f: [c.speedup for c in read_candidates([f])]
        ),
        Reader("plan.json", root / "plan.json", "json", lambda f: read_model(Plan, f)),
        Reader("plain answers", root / "plain.json", "json", lambda f: read_model(PlainAnswers, f)),
        Reader(".bin", root / "pickled/pytorch_model.bin", "binary", lambda f: _stored_dtype(f.parent)),
        Reader("store manifest", store / "manifest.json", "json", lambda f: read_store(f.parent).outputs),
        Reader("store", store / "shard-00000.safetensors", "tensors", lambda f: read_store(f.parent).outputs, True),
        Reader("importance", root / "importance.safetensors", "tensors", lambda f: load_scores(f, {"source": "x"})),
        Reader("draftlab.json", root / "run/draftlab.json", "json", lambda f: provenance.read_record(f.parent)),
        Reader("score.json", root / "score.json", "json", lambda f: [c.speedup for c in read_candidates([f])]),
        Reader("score.json again", root / "score.json", "json", read_score),
        Reader("replay.json", root / "replay.json", "json", lambda f: read_replay(f).chances()),
        Reader("search.json", root / "search.json", "json", read_search),
        Reader("profile", root / "profile.yaml", "yaml", read_profile),
        Reader("device", root / "device.yaml", "yaml", read_device),
        Reader("shape", root / "shape.yaml", "yaml", read_shape_file),
        Reader("recipe", root / "recipe.yaml", "yaml", lambda f: [s.config for s in read_recipe(f)]),
        Reader("draftlab.yaml", root / "draftlab.yaml", "yaml", lambda f: workspace.load(f.parent)),
        Reader("--config", root / "config.yaml", "yaml", lambda f: PruneConfig.build(PruneConfig.of_file(f, "prune"))),
        Reader("prompts", root / "prompts.jsonl", "jsonl", lambda f: file_prompts(f, tokenizer).rows),
        Reader("text", root / "text.jsonl", "jsonl", lambda f: documents(str(f))),
        Reader("server log", root / "log.jsonl", "jsonl", logged),
        Reader("turns", root / "turns.jsonl", "jsonl", turns._read),
        Reader("checkpoint", step / CONTENT, "zip", lambda f: load_state(f, "run"), True),
        Reader("run.json", step.parent / STATE_RECORD, "json", claimed, True),
        Reader("training log", root / "log2.jsonl", "jsonl", read_log),
    ]


def plain(value: Any) -> Any:
    """Return what was read as something to compare, of whatever it is made."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.double().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, BaseModel):
        return plain(dict(value))
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [(str(key), plain(item)) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))]
    return [plain(item) for item in value] if isinstance(value, list | tuple | set) else value


def _model(folder: Path) -> Path:
    build("llama", num_hidden_layers=2).save_pretrained(folder)
    train_tokenizer(TOKENIZER_TEXT, VOCAB, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    write_head_ids(folder, [0, 1, 2, 5, 9])
    return folder


def _adapter(folder: Path, model: Path) -> Path:
    adapted = get_peft_model(checkpoint.load_model(model, torch.float32), LoraConfig(r=2, target_modules="all-linear"))
    adapted.save_pretrained(folder)
    return folder


def _head(root: Path, model: Path) -> Path:
    """Write an EAGLE-3 head for a target of four layers."""
    config = eagle.head_config(model, [0, 1, 2], 40)
    weights = {name: torch.rand(size) for name, size in config.sizes().items()}
    head = eagle.Head(config=config, weights=weights, ids=torch.arange(40) * 2, embedding=None)
    (root / "eagle").mkdir()
    eagle.write(root / "eagle", head, "native", target=model, k=3)
    return root / "eagle"


def _store(folder: Path, model: Path) -> Path:
    rng = np.random.default_rng(0)
    manifest = Manifest(
        source="draftlab", target="model", target_sha256=None, tokenizer_sha256=vocabulary_sha256(model), vocab=VOCAB,
        dtype="float32", batch_size=4, text="target", data="x", data_sha256=None, prompt_tokens=None, sampling=None,
        logprobs="raw", top_logprobs=3, temperatures=(1.0,), seq_len=None, seed=0, planned=4, versions={},
    )  # fmt: skip

    def output(number: int) -> TargetOutput:
        ids = rng.integers(0, VOCAB, 6)
        top = np.stack([ids, (ids + 1) % VOCAB, (ids + 2) % VOCAB], 1)
        logprobs = np.log(np.tile([0.5, 0.25, 0.125], (6, 1))).astype(np.float16).astype(np.float32)
        lists = StoredLogprobs.of_lists(top, logprobs, logprobs[:, 0], ids)
        return TargetOutput(number=number, prompt=ids[:3], ids=ids, logprobs=logprobs[:, 0], top=lists)

    write_store(folder, manifest, lambda i: [output(4 * i + j) for j in range(4)], tokenizer=model)
    return folder


def _unfinished(state: Path) -> Path:
    """Write the state of an unfinished run with one checkpoint; return the checkpoint."""
    claim_state(state, CLAIM)
    step = state / "step-00000002"
    step.mkdir()
    save(step / CONTENT, {"step": 2, "weights": {"a": torch.rand(3, 4), "b": torch.arange(5)}}, "run")
    return step


def _texts(root: Path) -> None:
    def lines(name: str, *rows: object) -> None:
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    said = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "return"}]
    lines("prompts.jsonl", {"prompt": "def parse", "category": "code"}, {"turns": ["class", "def"]}, {"text": "if"})
    lines("text.jsonl", {"text": "def parse(line): return"}, {"messages": said}, {"text": "class Reader: pass"})
    means = {"step": 0, "tokens": 9, "loss": 1.5, "cross_entropy": 2.0, "acceptance": 0.5, "offsets": [0.5, 0.25]}
    steps = {"step": 1, "loss": 1.25, "acceptance": 0.5, "grad_norm": 0.125, "lr": 0.001, "tokens": 64, "seconds": 0.5}
    lines("log2.jsonl", means, steps, steps | {"step": 2})
    lines("turns.jsonl", {"category": "", "messages": said}, {"category": "a", "messages": said[:1]})
    entry = {"prompt_ids": [0, 5], "ids": [7, 9], "top_ids": [[7, 8], [3, 9]], "logprobs": [-0.5, -1.5]}
    lines("log.jsonl", *[entry | {"top_logprobs": [[-0.5, -2.0], [-0.75, -1.5]]}] * 3)


def _records(root: Path) -> None:
    def dump(name: str, value: BaseModel) -> None:
        (root / name).write_text(value.model_dump_json(indent=1))

    (root / "run").mkdir()
    provenance.write_record(root / "run", "prune", {"layers": 2}, [], 0.0)
    dump("score.json", score())
    text = ReplayedText(
        number=0, category="", prompt_tokens=5, finish_reason="stop", chances=[0.5, 1.0, 0.0],
        distinct_4grams=0.8,
    )  # fmt: skip
    replay = Replay(
        draft="d", draft_sha256="0", dtype="float32", target="t", target_sha256=None, outputs_sha256="1",
        tokenizer_sha256="2", sampling=SamplingParams(max_tokens=8), rule="rejection", draft_temperature=1.0,
        texts=[text, text], command="draftlab replay", versions={}, created="",
    )  # fmt: skip
    dump("replay.json", replay)
    trial = ShapeTrial(
        name="a", k=2, length=2.0, tokens_per_second=90.0, speedup=1.2, rejection=0.4, draft_ms=1.0, promise=90.0
    )
    rung = Rung(steps=20, trials=[trial])
    found = {"target": "t", "source": "s", "shapes": {"a": SHAPE}, "rungs": [rung]}
    dump("search.json", Search(**found, spent_seconds=9, measured=[]))
    machine = Machine(
        device="cpu", cores=2, dtype="float32", tflops=0.1, training_dtype="float32", training_tflops=0.1,
        gigabytes_per_second=10, slowdown=1, free_memory=1 << 33, free_disk=1 << 33,
    )  # fmt: skip
    step = PlannedStep(name="score", command="score", what="score", minutes=2, least_minutes=1)
    dump("plan.json", Plan(
        settings={"target": "tiny", "minutes": 5}, target="tiny", machine=machine, prompts="p", candidates=["draft"],
        left_out={"eagle": "no time"}, layers=[1, 2], widths=[64], first_steps=20, steps=[step],
    ))  # fmt: skip
    length = Interval(value=2.0, low=1.9, high=2.1, n=8)
    runs = [ServedGeneration(prompt=n, tokens=3, seconds=0.5) for n in (0, 1)]
    dump("plain.json", PlainAnswers(
        kind="vllm", model="m", version="1", asked={"seed": 0}, runs=runs, tokens=[[1, 2, 3], [4, 5, 6]]
    ))  # fmt: skip
    gain = length.model_dump()
    row = {"k": 2, "tokens_per_pass": gain, "speedup": gain, "tokens_per_second": 90.0}
    schedule = Schedule(ranges=[(1, 4, 3), (5, 8, 1)], pays_up_to=8)
    prediction = {"name": "d", "target": "t", "rows": [row], "draft_sha256": "0", "schedule": schedule.model_dump()}
    (root / "prediction.json").write_text(json.dumps({"predictions": [prediction]}))
    _profile(root / "profile.yaml")
    shutil.copyfile(sorted((widths_folder().parent / "profiles").glob("*.yaml"))[0], root / "device.yaml")
    write_shape_file(SHAPE, root / "shape.yaml", "a shape")
    (root / "draftlab.yaml").write_text("target: tiny\nsource: tiny\ndata: stdlib\nruns: runs\n")
    steps = [{"prune": {"layers": 3, "width": 128}}, {"distill": {"draft": "runs/a", "steps": 20, "lr": 0.0003}}]
    (root / "recipe.yaml").write_text(yaml.safe_dump({"steps": steps}))
    (root / "config.yaml").write_text(yaml.safe_dump({"source": "tiny", "layers": 3, "width": 128, "untie": False}))


def _profile(file: Path) -> None:
    def latency(width: int) -> Latency:
        return Latency(width=width, median_ms=1.5 * width, low_ms=width, high_ms=2 * width, n=3)

    forward = [Point(**latency(w).model_dump(), batch=1, context=c) for w in (1, 2) for c in (16, 64)]
    steady = [SteadyPoint(**p.model_dump(), after=n) for n in (1, 2) for p in forward if p.width == 1]
    write_profile(Profile(
        kind="measured", name="m", sha256=None, shape=SHAPE, device="here", dtype="float32", mode="eager", threads=1,
        forward=forward, steady=steady, prefill=[latency(16)], host=[latency(1), latency(5)], bandwidth_gbs=10,
        matmul_tflops={"float32": 0.1}, command="draftlab profile m", versions={}, created="",
    ), file)  # fmt: skip
