"""Compare EAGLE-3 and DFlash heads in draftlab and in speculators: logits, acceptance, and speed and gain of training.

Run this with a Python that has speculators (make peers). The heads are for the target tiny. Both libraries train on the
same rows in float32, on one thread, with three steps of training-time test, at learning rates that double until
acceptance falls. draftlab trains with the defaults of its command. speculators trains with its own class, its loss
kl_div, its Muon and schedule, and the norms of its command line. Finished parts are read from --folder, so a run that
was killed resumes.

Acceptance is sum min(p, q) on held-out text at each step of a chain. The gap compares the tokens that the libraries
draft with the same head, on text that the target writes greedily.
"""

import copy
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoConfig, get_linear_schedule_with_warmup

from benchmarks import environment
from benchmarks.eagle import served
from draftlab.acceptance.block_logprobs import score_blocks
from draftlab.acceptance.chain_logprobs import score_chains
from draftlab.commands import COMMANDS
from draftlab.commands.distill import DistillConfig, prepare
from draftlab.data import HeldOut
from draftlab.engine.generate import decode, output_tokens
from draftlab.model import checkpoint, dflash, eagle, eagle_llama, hub, llama
from draftlab.sampling import SamplingParams
from draftlab.training.eagle import ChainBatches, texts_of, within_chains
from draftlab.training.eagle_head import EagleHead, EagleObjective, EagleTeacher
from draftlab.training.losses import parse_loss
from draftlab.training.trainer import StepRecord, train

TARGET, DATA, ROWS, STEPS = "tiny", "stdlib", 8, 3  # STEPS: steps of training-time test
# first learning rates to try, including the defaults: 0.002 in draftlab and 0.001 in speculators
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
HIGHEST = 0.1  # higher learning rates are not tried
NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
MUON = {
    "optimizer": "muon", "weight_decay": 0.01, "muon_momentum": 0.95, "muon_weight_decay": 0.1, "muon_ns_steps": 5,
    "muon_adjust_lr_fn": "match_rms_adamw",
}  # fmt: skip
FEW = 20  # training steps of the heads whose logits are compared
BLOCK = {"block_size": 8, "sample_from_anchor": False}


def main(
    folder: Annotated[Path, typer.Option(help="Folder for heads and finished parts.")] = Path(
        "runs/heads"
    ),
    steps: Annotated[int, typer.Option(help="Training steps, each with 8 rows.")] = 80,
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    seeds: Annotated[
        int, typer.Option(help="Seeds for each compared rate. 0 does not compare training.")
    ] = 3,
    vllm: Annotated[
        Path | None, typer.Option(help="Path of vllm, to serve a head with it.")
    ] = None,
) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    target = hub.locate(TARGET)
    run = Training(folder, target, steps, seq_len)

    def part(name: str, measure: Callable[..., Any], *arguments: Any) -> Any:
        file = folder / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(measure(*arguments)))
        return json.loads(file.read_text())

    def arm(side: str, lr: float, seed: int) -> dict[str, Any]:
        return part(f"{side}-{lr:g}-{seed}", run.measure, side, lr, seed)

    logits, gap = part("logits", run.logits), part("gap", run.gaps)
    trained = {}
    for side, default in (("draftlab", 2e-3), ("speculators", 1e-3)) if seeds else ():
        swept = {lr: arm(side, lr, 0)["acceptance"][0] for lr in RATES}
        best = max(swept, key=swept.__getitem__)
        while best == max(swept) and 2 * best <= HIGHEST:
            swept[2 * best] = arm(side, 2 * best, 0)["acceptance"][0]
            best = max(swept, key=swept.__getitem__)
        rows = {lr: [arm(side, lr, seed) for seed in range(seeds)] for lr in {best, default}}
        trained[side] = {
            "best_rate": best,
            "default_rate": default,
            "first_by_rate": {f"{lr:g}": value for lr, value in swept.items()},
            "best": spread(rows[best]),
            "default": spread(rows[default]),
        }
    result = {
        "speculators_logits": logits,
        "speculators_acceptance_gap": max(abs(row["gap"]) for row in gap.values()),
        "acceptance": gap,
        "training": trained,
        "vllm_gap": None,
    }
    if vllm is not None:
        row = part("vllm", served, folder / "vllm", folder / "eagle31", "vllm", vllm, STEPS)
        result |= {"vllm_gap": row["gap"], "vllm": row}
    settings = {
        "target": TARGET,
        "data": DATA,
        "few_steps": FEW,
        "steps": steps,
        "rows": ROWS,
        "seq_len": seq_len,
        "seeds": seeds,
    }
    print(json.dumps(result | settings | {"speculators": version("speculators")} | environment(1)))


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean, lowest and highest value over seeds of acceptance by step, and of tokens per CPU second."""

    def of(values: list[float]) -> list[float]:
        return [statistics.fmean(values), min(values), max(values)]

    return {
        "acceptance": [
            of(list(values)) for values in zip(*(row["acceptance"] for row in rows), strict=True)
        ],
        "first_by_seed": [row["acceptance"][0] for row in rows],
        "tokens_per_cpu_second": of([row["tokens"] / row["cpu_seconds"] for row in rows]),
    }


def their_eagle(target: Path, ids: Tensor, layer_ids: list[int], **fields: Any) -> Any:
    """Return a new EAGLE-3 head as the command line of speculators makes it. ids: Target id of each draft id, [W]."""
    vocab = checkpoint.vocab_size(target)
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    core = import_module("speculators.models.eagle3.core")
    return core.Eagle3DraftModel.from_training_args(
        _layers(target, 1, fields), known, ids - torch.arange(len(ids)), draft_vocab_size=len(ids),
        verifier_name_or_path=str(target), target_layer_ids=layer_ids, draft_attn_impl="sdpa",
        **{"ttt_steps": STEPS, "norm_before_residual": False} | fields,
    )  # fmt: skip


def their_dflash(target: Path, layers: int, layer_ids: list[int], **fields: Any) -> Any:
    """Return a new DFlash head of speculators that predicts all ids of the target."""
    core = import_module("speculators.models.dflash.core")
    return core.DFlashDraftModel.from_training_args(
        _layers(target, layers, fields), draft_vocab_size=checkpoint.vocab_size(target),
        verifier_name_or_path=str(target), target_layer_ids=layer_ids, draft_attn_impl="eager", **BLOCK | fields,
    )  # fmt: skip


def _layers(target: Path, count: int, fields: dict[str, Any]) -> Any:
    """Return a configuration with `count` layers like those of the target, with the sliding window in `fields`."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers, config.tie_word_embeddings = count, False
    if window := fields.pop("sliding_window", None):
        config.sliding_window, config.layer_types = window, ["sliding_attention"] * count
    return config


def their_chains(model: Any, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """Return the logits of an EAGLE-3 head of speculators at each step of its chains, [T, W] each.

    ids: [1, T + 1]. states: The target's hidden states, [1, T, A E].
    """
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: found.append(call[2][0].detach()))
    documents = torch.zeros(1, states.shape[1], dtype=torch.long)
    with torch.no_grad():
        model(hidden_states=states, input_ids=ids[:, 1:], document_ids=documents, ttt_steps=steps)
    hook.remove()
    return found


def their_blocks(model: Any, ids: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
    """Return the logits of a DFlash head of speculators for blocks of M tokens, [A, M, W].

    The first logits of a block are not used.

    Args:
        ids: [1, T].
        states: The target's hidden states, [1, T, L D].
        anchors: Ascending positions at which blocks begin, before the last M positions, [A].
    """
    mask = torch.zeros(ids.shape)
    mask[0, anchors] = 1
    last = states.new_zeros(1, ids.shape[1], states.shape[2] // len(model.target_layer_ids))
    with torch.no_grad():
        _, logits, *_ = model._backbone_forward(
            states, ids, mask, last, torch.zeros_like(ids), max_anchors=len(anchors)
        )
    return logits[0].unflatten(0, (len(anchors), -1))


class Training:
    """Trains and compares heads of both libraries for the same target on the same text."""

    def __init__(self, folder: Path, target: Path, steps: int, seq_len: int) -> None:
        self.folder, self.target, self.steps, self.seq_len = folder, target, steps, seq_len

    def job(self, seed: int, **settings: Any) -> Any:
        given = {
            "student": f"eagle:ttt_steps={STEPS}", "target": str(self.target), "data": DATA, "steps": self.steps,
            "batch_size": ROWS, "seq_len": self.seq_len, "seed": seed, "training_dtype": "float32", "device": "cpu",
            "eval_steps": 10**9, "save_steps": 10**9,
        }  # fmt: skip
        return cast(Any, prepare(DistillConfig.build(given | settings), True).run).args[0]

    def measure(self, side: str, lr: float, seed: int) -> dict[str, Any]:
        """Train a head. Return its held-out acceptance by step, and the tokens and CPU seconds of its training.

        side: Library that trains, "draftlab" or "speculators".
        """
        out = self.folder / f"{side}-{lr:g}-{seed}"
        out.mkdir(exist_ok=True)
        trained = self.ours if side == "draftlab" else self.theirs
        seconds = trained(self.job(seed, lr=lr), lr, seed, out)
        head = eagle.read(out, self.target, torch.float32)
        _, heldout = texts_of(self.job(0), self.target, out)
        tokens = self.steps * ROWS * self.seq_len
        return {
            "acceptance": self.acceptance(head, heldout),
            "tokens": tokens,
            "cpu_seconds": seconds,
        }

    def ours(self, job: Any, lr: float, seed: int, out: Path) -> float:
        state = out / "state"
        shutil.rmtree(state, ignore_errors=True)  # of a killed run
        state.mkdir()
        began = time.process_time()
        opened = job.student.open(job, state)
        seconds = time.process_time() - began
        for record in train(opened.module, opened.setup, job.loop, state):
            now = time.process_time()
            seconds, began = seconds + (now - began if isinstance(record, StepRecord) else 0), now
        opened.write(out, state)
        return seconds

    def theirs(self, job: Any, lr: float, seed: int, out: Path) -> float:
        """Train a head in speculators, with the draft ids of draftlab's head with the same seed."""
        found = self.folder / f"draftlab-0.002-{seed}"
        own = eagle.read(
            found if self.steps > FEW else self.folder / "eagle31", self.target, torch.float32
        )
        batches, _ = texts_of(job, self.target, out)
        began = time.process_time()
        torch.manual_seed(seed)
        model = their_eagle(self.target, own.ids, list(own.config.layer_ids), **NORMS)
        verifier = self.teacher(
            (*own.config.layer_ids, checkpoint.auto_config(self.target).num_hidden_layers)
        )
        rates = SimpleNamespace(**MUON, lr=lr, muon_lr=lr)
        optimizers = import_module("speculators.train.optimizers").build_optimizers(model, rates)
        schedules = [
            get_linear_schedule_with_warmup(each, self.steps // 100, self.steps)
            for each in optimizers
        ]
        loss_config = import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
        for step in range(self.steps):
            batch = ChainBatches(batches, STEPS).batch(step)
            ids = torch.from_numpy(batch.ids[:, :-1])
            states, last = verifier.states_of(ids)[0].split(
                [len(own.config.layer_ids) * 256, 256], -1
            )
            rows = torch.arange(len(ids)).unsqueeze(1).expand(-1, ids.shape[1] - 1)
            mask = torch.from_numpy(batch.mask)[:, 1:]
            given = {
                "hidden_states": states[:, :-1], "input_ids": ids[:, 1:], "document_ids": rows,
                "verifier_last_hidden_states": last[:, 1:], "loss_mask": mask,
            }  # fmt: skip
            packed = {name: tensor.flatten(0, 1).unsqueeze(0) for name, tensor in given.items()}
            _, loss, _ = model(**packed, ttt_steps=STEPS, loss_config=loss_config)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in (*optimizers, *schedules):
                each.step()
        seconds = time.process_time() - began
        model.save_pretrained(out)
        return seconds

    def teacher(self, layer_ids: tuple[int, ...], ids: Tensor | None = None) -> EagleTeacher:
        model = checkpoint.load_model(self.target, torch.float32)
        return EagleTeacher(model, layer_ids, ids, 1.0, torch.device("cpu"))

    def acceptance(self, head: eagle.Head, heldout: HeldOut) -> list[float]:
        teacher = self.teacher(head.config.layer_ids, head.ids)
        student = EagleHead.of(head, teacher.embedding)
        objective = EagleObjective(student, teacher.ids, parse_loss("fkl"), 1.0, STEPS)
        sums, count = torch.zeros(STEPS), 0
        for batch in (within_chains(batch, STEPS) for batch in heldout.batches):
            ids, mask = torch.from_numpy(batch.ids), torch.from_numpy(batch.mask)
            with torch.no_grad():
                sums += objective(ids, mask, teacher.distributions(batch))[:, 2]
            count += batch.predictions
        return (sums / count).tolist()

    @cached_property
    def heads(self) -> dict[str, tuple[Path, Any]]:
        """Return heads by name, each as a directory for draftlab and as a model of speculators.

        Heads named "here" are trained by draftlab, and heads named "there" by speculators. Both libraries read both.
        """
        core = import_module("speculators.models.eagle3.core")

        def opened(folder: Path) -> Any:
            config = core.Eagle3SpeculatorConfig.from_pretrained(folder)
            config.transformer_layer_config._attn_implementation = "sdpa"
            return core.Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()

        few = {
            "target": TARGET,
            "data": DATA,
            "steps": 20,
            "batch_size": ROWS,
            "seq_len": self.seq_len,
        }
        norms = ",".join(f"{name}=true" for name in NORMS)
        for name, student in {
            "eagle31": f"eagle:ttt_steps={STEPS},{norms}",
            "dflash": f"dflash:block_size={BLOCK['block_size']}",
        }.items():
            if not (self.folder / name).exists():
                COMMANDS["distill"](student=student, **few, out=self.folder / name)
        exported = self.folder / "eagle31-speculators"
        if not exported.exists():
            COMMANDS["export"](
                draft=str(self.folder / "eagle31"), target=TARGET, to="speculators", out=exported
            )
        theirs = self.folder / "eagle31-there"
        if not theirs.exists():
            few_steps = Training(self.folder, self.target, FEW, self.seq_len)
            few_steps.theirs(few_steps.job(0), 1e-3, 0, theirs)
        found = {
            "eagle31 here": (self.folder / "eagle31", opened(exported)),
            "eagle31 there": (theirs, opened(theirs)),
        }
        shape = dflash.check(self.folder / "dflash", self.target)
        layers = list(shape.layer_ids)
        copy = their_dflash(self.target, shape.layers, layers, mask_token_id=shape.mask_token_id)
        copy.load_state_dict(dict(checkpoint.Weights(self.folder / "dflash")), strict=False)
        found["dflash here"] = (self.folder / "dflash", copy.float().eval())
        torch.manual_seed(0)
        own = their_dflash(self.target, 2, layers, mask_token_id=shape.mask_token_id)
        self._train_dflash(own, layers)
        own.save_pretrained(self.folder / "dflash-there")
        found["dflash there"] = (self.folder / "dflash-there", own.eval())
        return found

    def _train_dflash(self, model: Any, layer_ids: list[int]) -> None:
        """Train a DFlash head of speculators for FEW steps of one row, with the default loss of speculators."""
        batches, _ = texts_of(self.job(0), self.target, self.folder)
        verifier = self.teacher((*layer_ids, checkpoint.auto_config(self.target).num_hidden_layers))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        loss_config = import_module("speculators.losses").resolve_loss_config("ce", "eager")
        for step in range(FEW):
            ids = torch.from_numpy(batches.batch(step).ids[:1])
            states, last = verifier.states_of(ids)[0].split([len(layer_ids) * 256, 256], -1)
            _, loss, _ = model(
                states, ids, torch.ones(ids.shape), last, torch.zeros_like(ids), loss_config=loss_config, max_anchors=16
            )  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def logits(self) -> dict[str, Any]:
        """Compare the logits of the libraries. Return the largest difference and the fraction of equal argmaxes.

        Results are by head and data type. "rounding" is the largest difference between logits of speculators in that
        type and in float32.
        """
        ids = torch.from_numpy(
            texts_of(self.job(0), self.target, self.folder)[1].ids[:1, : self.seq_len + 1]
        ).long()
        rows = {}
        for name, (folder, model) in self.heads.items():
            exact = self._there(model, ids, torch.float32)
            for dtype in (torch.float32, torch.bfloat16):
                # a copy, because rounded weights stay rounded
                there = self._there(copy.deepcopy(model).to(dtype), ids, dtype)
                here = self._here(folder, ids, dtype)
                rows[f"{name} {checkpoint.dtype_name(dtype)}"] = {
                    "largest_difference": float((here - there).abs().max()),
                    "equal_argmax": float((here.argmax(-1) == there.argmax(-1)).float().mean()),
                    "rounding": float((there - exact).abs().max()),
                    "largest_logit": float(exact.abs().max()),
                }
        return rows

    def _states(self, layer_ids: tuple[int, ...], ids: Tensor) -> Tensor:
        return self.teacher(layer_ids).states_of(ids)[0]

    def _there(self, model: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
        states = self._states(tuple(model.target_layer_ids), ids[:, :-1]).to(dtype)
        if type(model).__name__.startswith("DFlash"):
            return their_blocks(model, ids[:, :-1], states, self._anchors(model.block_size))[
                :, 1:
            ].float()
        count = states.shape[1] - STEPS
        return torch.stack(
            [step[:count].float() for step in their_chains(model, ids, states, STEPS)]
        )

    def _anchors(self, block: int) -> Tensor:
        return torch.arange(4, self.seq_len - block - 1, 5)

    def _here(self, folder: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
        target = llama.load(self.target, dtype)
        if hub.head_kind(folder) == "dflash":
            head = dflash.load(folder, self.target, target.embed, target.head)
            anchors = self._anchors(head.config.block_size)
            cache = head.new_cache(len(anchors), self.seq_len)
            states = (
                self._states(head.layer_ids, ids[:, :-1]).to(dtype).expand(len(anchors), -1, -1)
            )
            head.read(states, torch.arange(self.seq_len).expand(len(anchors), -1), cache)
            cache.used = anchors.tolist()
            return head.block_logits(ids[0, anchors], head.config.most, cache).float()
        head = eagle.read(folder, self.target, dtype)
        student = EagleHead.of(head, target.embed).to(dtype)
        states = self._states(head.config.layer_ids, ids[:, :-1]).to(dtype)
        with torch.no_grad():
            outputs = student(ids[:, :-1], states, STEPS)
            return torch.stack(
                [student.lm_head(out)[0, : states.shape[1] - STEPS].float() for out in outputs]
            )

    def gaps(self) -> dict[str, Any]:
        """Return the acceptance of the drafted tokens 1 to 3 of each head in both libraries, on the same texts."""
        target = llama.load(self.target, torch.float32)
        heldout = texts_of(self.job(0), self.target, self.folder)[1]
        prompts = [row.tolist() for row in heldout.ids[:24, :32]]
        greedy = SamplingParams(temperature=0, max_tokens=64)
        texts = [
            (np.array(prompt), np.array(text))
            for prompt, text in zip(
                prompts, output_tokens(decode(target, prompts, greedy)), strict=True
            )
        ]
        rows = {}
        for name, (folder, model) in self.heads.items():
            if hub.head_kind(folder) == "dflash":
                head = dflash.load(folder, self.target, target.embed, target.head)
                # the tokens of a block read each other, so blocks must be equally long in both libraries
                most = head.config.most
                scored = score_blocks(target, head, texts, target.shape.vocab, greedy, most)
                views = [view.at(most) for view in scored]
            else:
                chains = eagle_llama.load(folder, self.target, target, target.device)
                views = score_chains(target, chains, texts, target.shape.vocab, greedy, STEPS)
            here, there = [], []
            for text, view in zip(texts, views, strict=True):
                drafted = self._drafted(model, text)
                counted = drafted >= 0
                here.append(np.exp(view.logprobs[:, :STEPS])[counted])
                there.append((drafted == text[1][:, None])[counted])
            ours, theirs = (float(np.concatenate(side).mean()) for side in (here, there))
            count = sum(map(len, here))
            rows[name] = {"here": ours, "there": theirs, "gap": ours - theirs, "tokens": count}
        return rows

    def _drafted(self, model: Any, text: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the tokens that speculators drafts in place of the n tokens of a text, [n, K].

        Column j is for a step that began j tokens earlier. -1 stands for no drafted token.
        """
        prompt, n = len(text[0]), len(text[1])
        ids = torch.from_numpy(np.concatenate(text)).long().unsqueeze(0)
        states = self._states(tuple(model.target_layer_ids), ids)
        drafted = np.full((n, STEPS), -1)
        if type(model).__name__.startswith("DFlash"):
            anchors = torch.arange(prompt - 1, ids.shape[1] - model.block_size - 1)
            found = their_blocks(model, ids, states, anchors)[:, 1:].argmax(-1).numpy()
            for age in range(STEPS):
                drafted[np.arange(len(anchors)) + age, age] = found[:, age]
            return drafted
        places = ids.shape[1] - 2
        with torch.no_grad():
            chains = model(
                hidden_states=states[:, :places], input_ids=ids[:, 1 : places + 1],
                document_ids=torch.zeros(1, places, dtype=torch.long), ttt_steps=STEPS,
            )  # fmt: skip
        known = (torch.arange(len(model.d2t)) + model.d2t).numpy()
        for age, chain in enumerate(chains):
            first = prompt - 2
            own = known[chain[0, first : places - age].numpy()]
            drafted[age : age + len(own), age] = own
        return drafted


if __name__ == "__main__":
    typer.run(main)
