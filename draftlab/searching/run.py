"""Search for the shape and K with which a target is fastest here: cut, distil, replay, price and measure candidates.

Every step writes its output under the state directory of the search once; a killed search resumes with what is there.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab import provenance
from draftlab.acceptance.expected import chain
from draftlab.atomic import remove_state
from draftlab.config.base import OutputConfig
from draftlab.config.distill import DistillConfig
from draftlab.config.drafters import parse_drafter
from draftlab.config.latency import ProfileConfig
from draftlab.config.outputs import OutputsBuildConfig, ReplayConfig
from draftlab.config.prune import PruneConfig
from draftlab.config.score import ScoreConfig
from draftlab.config.search import SearchConfig
from draftlab.config.server_rules import Acceptance
from draftlab.config.students import parse_student
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.predict import best_k
from draftlab.latency.profile import Running, grid_of, profile_models, subjects
from draftlab.latency.scaling_law import ScalingLaw, law_shapes, read_law
from draftlab.latency.workload import Workload, workload_of_replay
from draftlab.model import checkpoint, hub
from draftlab.model.shape import Shape
from draftlab.model.size import read_size
from draftlab.model.tokenizer import common_vocabulary, known_ids
from draftlab.output import Output
from draftlab.prompts import data_prompts, file_prompts, load_prompts
from draftlab.pruning.refit import Refit
from draftlab.pruning.run import prune
from draftlab.pruning.source import Source, check_cut
from draftlab.pruning.texts import Text
from draftlab.pruning.trial_model import prunable_shape
from draftlab.registry import REJECTION
from draftlab.results.compare import candidate_of, rank
from draftlab.results.score import read_score
from draftlab.sampling import SamplingParams
from draftlab.scoring.comparison import Comparison, Engine, Requests
from draftlab.scoring.run import score
from draftlab.searching.schedule import (
    FILE,
    MAX_PASS_SHARE,
    MAX_WIDE_SHARE,
    REDUCTION,
    Measured,
    Rung,
    Search,
    Trial,
    affordable_steps,
    candidates,
    read_search,
    write_search,
)
from draftlab.searching.setup import check_heads, check_text, engine_settings
from draftlab.searching.shapes import with_head
from draftlab.target_outputs.build import REPLAY_BATCH, Answers, Rows, build
from draftlab.target_outputs.replay import Drafting, drafter_of, read_replay, replay
from draftlab.target_outputs.store import read_store
from draftlab.target_outputs.targets import LocalTarget
from draftlab.training.distill import Distillation, distill
from draftlab.training.loop import Loop
from draftlab.training.texts import Hardware, TrainingText

CALIBRATION_TOKENS = 8192
SEQ_LEN = 256
TOP_LOGPROBS = 64  # of the target, to distil from
MEASURED_SHARE = 0.25  # of the time, reserved to measure the leaders
TRIED_SHARES = (0.3, 0.6)  # of the time, after which rung 0, or a later one, has no further candidates
REPLAYED_TEXTS, PROMPT_TOKENS, MAX_TOKENS = 48, 64, 96


def search(config: SearchConfig, tried: list[Shape], output: Output) -> Search:
    """Search among these shapes, and write the winner's draft or head, the target's texts, the scores and search.json.

    Raises:
        UserError: source and target with different vocabularies, a head of another target, a mode that does not run
            here, too few cheap shapes.
    """
    target, source = hub.locate(config.target), hub.locate(config.source)
    check_text(config)
    common_vocabulary(source, target)
    named = dict(map(prunable_shape, config.against))
    heads, running = check_heads(config, target), engine_settings(config, [target, source])
    paths = [path for path in (config.outputs, config.prompt_file, *config.heads.values()) if path is not None]
    output.claim_state([target, source, *paths], but=["minutes"])  # a search may resume with another number of minutes
    work = Searcher(config=config, output=output, target=target, source=source, running=running)
    result = work.measure(work.halve(work.start(tried, named, heads)))
    with output.directory() as directory:
        shutil.copytree(work.draft(result.winner.name, len(result.rungs) - 1), directory / "draft")
        for part in ("texts", "score"):
            shutil.copytree(output.state / part, directory / part)
        write_search(result, directory)
        output.record(directory, [target, source, *paths], total_seconds=result.spent_seconds)
    remove_state(output.state)
    return result


def estimate(config: SearchConfig, tried: list[Shape]) -> Mapping[str, object]:
    """Return what a search among these shapes would try."""
    target, source = (hub.locate(name, weights=False) for name in (config.target, config.source))
    common_vocabulary(source, target)
    named = [*dict(map(prunable_shape, config.against)), *check_heads(config, target)]
    sizes = ", ".join(f"{shape.layers} x {shape.hidden}" for shape in tried)
    return {
        "target": read_size(target).describe(), "source": with_head(config, source).describe(), "try": sizes,
        "compare with": ", ".join(named) or "nothing", "minutes": config.minutes,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Searcher:
    """The steps of a search, each of which is done once."""

    config: SearchConfig
    output: Output
    target: Path
    source: Path
    running: dict[str, Any]  # device, dtype, mode, threads

    def start(self, tried: list[Shape], named: dict[str, Shape], heads: dict[str, int]) -> Search:
        """Return the search that an earlier run left, or rung 0 with every candidate. heads: their parameters."""
        if (self.output.state / FILE).exists():
            return read_search(self.output.state)
        pass_ms, share = (self._wide_ms, MAX_WIDE_SHARE) if self.config.parallel else (self.law.ms, MAX_PASS_SHARE)
        cheap = candidates(checkpoint.planned_shape(self.source), tried, pass_ms, self._target_ms, share)
        renamed = {name: label for name, s in cheap.items() for label, wished in named.items() if s == wished}
        every = {renamed.get(name, name): shape for name, shape in cheap.items()} | named
        return Search(
            target=str(self.target), source=str(self.source), shapes=every, heads=heads, named=[*named, *heads],
            rungs=[Rung(steps=0, names=[*every, *heads])],
        )  # fmt: skip

    def halve(self, search: Search) -> Search:
        """Distil all candidates for a few steps, since a cut alone says little; then one in three on each rung."""
        config, before = self.config, search.spent_seconds
        while True:
            search = self._try_all(search, before)
            rung, number = search.rungs[-1], len(search.rungs) - 1
            competing = len(rung.names) - len(search.named)
            if number > 1 and competing <= config.finalists:
                return search
            search = search.with_promises(lambda name, left, s=search: self._promise(s, name, left))
            advancing, steps = search.best(competing), config.first_steps
            if number > 0:
                advancing = search.best(max(config.finalists, -(-competing // REDUCTION)))
                steps = REDUCTION * rung.steps
                if len(advancing) - len(search.named) <= config.finalists:
                    left = (1 - MEASURED_SHARE) * 60 * config.minutes - search.spent_seconds
                    shapes = [trial for trial in advancing if trial.name not in search.heads]
                    steps = affordable_steps(left, shapes, rung.steps, fewest=config.first_steps, most=config.max_steps)
                    if steps <= rung.steps:  # the drafts are there already
                        return search.with_only([trial.name for trial in advancing])
            search = search.next_rung(steps, advancing)
            note(f"rung {number + 1}: {len(advancing)} drafts, {steps} steps each")
            write_search(search, self.output.state)

    def _try_all(self, search: Search, before: float) -> Search:
        """Return the search with a trial of every candidate of the last rung, or of those that the time allows.

        before: seconds that earlier processes spent.
        """
        until = TRIED_SHARES[min(len(search.rungs) - 1, 1)] * 60 * self.config.minutes
        while left := search.rungs[-1].left:
            fewer = search.without_late(max(2, self.config.finalists))
            if search.spent_seconds > until and fewer != search:
                note(f"rung {len(search.rungs) - 1}: no time for {len(left) - len(fewer.rungs[-1].left)} more drafts")
                search = fewer
                continue
            trial = self._trial(search, left[0])
            search = search.with_trial(trial, before + time.time() - self.output.started_at)
            write_search(search, self.output.state)
        return search

    def measure(self, search: Search) -> Search:
        """Score the leaders together, and rank them by their measured speed."""
        config, last, start = self.config, search.rungs[-1], time.time()
        ks = sorted({trial.k for trial in last.trials if trial.name in last.names})
        scores = self._once(
            "score", self._compare, ScoreConfig,
            draft=[str(self.draft(name, len(search.rungs) - 1)) for name in last.names if name in search.shapes],
            drafter=config.drafter, target=str(self.target), **self._prompts, **self.running,
            k=ks, num_prompts=config.num_prompts, max_tokens=MAX_TOKENS,
            repeats=1, seed=config.seed + 1,
        )  # fmt: skip
        ranked = rank([candidate_of(read_score(scores / name)) for name in last.names])
        measured = [
            Measured(
                name=r.candidate.name, k=r.candidate.k, length=r.candidate.tokens_per_pass, gain=r.candidate.speedup,
                tokens_per_second=r.candidate.tokens_per_second, ratio_to_fastest=r.ratio_to_fastest,
                changed=r.candidate.output_differs,
            )
            for r in ranked
        ]  # fmt: skip
        spent = search.spent_seconds + time.time() - start
        return search.model_copy(update={"measured": measured, "spent_seconds": spent})

    def _compare(self, config: Any, output: Output) -> None:
        """Score what a config says, on one stream."""
        drafts = {hub.checkpoint_name(Path(path)): Path(path) for path in config.draft}
        device = checkpoint.resolve_device(config.device)
        prompts = load_prompts(
            config.prompt_file,
            config.data,
            checkpoint.load_tokenizer(self.target),
            count=config.num_prompts,
            tokens=config.prompt_tokens,
            seed=config.seed,
        )
        stop = checkpoint.eos_token_ids(self.target)
        sampling = SamplingParams(max_tokens=config.max_tokens, seed=config.seed, stop_token_ids=stop)
        comparison = Comparison(
            target=self.target,
            drafts=drafts,
            drafters=list(map(parse_drafter, config.drafter)),
            default_draft=next(iter(drafts.values()), None),
            requests=Requests(prompts=prompts, sampling=sampling, repeats=config.repeats),
            engine=Engine(
                device=device,
                dtype=checkpoint.resolve_dtype(config.dtype, device),
                mode=config.mode,
                threads=config.threads,
            ),
            ks=config.k,
            batches=[1],
            acceptance=Acceptance(REJECTION, None),
            data=config.data,
        )
        comparison.check()
        score(comparison, output)

    def draft(self, name: str, rung: int) -> Path:
        return self.config.heads.get(name) or self.output.state / f"rung-{rung}" / name

    @property
    def _text(self) -> dict[str, Any]:
        """Return the settings of a cut draft's calibration text."""
        return {"data": self.config.data} if self.config.outputs is None else {"outputs": self.config.outputs}

    @property
    def _prompts(self) -> dict[str, Any]:
        """Return the settings of the prompts to replay and to measure candidates on."""
        if self.config.prompt_file is not None:
            return {"prompt_file": self.config.prompt_file}
        return {"data": self.config.data, "prompt_tokens": PROMPT_TOKENS}

    @cached_property
    def law(self) -> ScalingLaw:
        """The latency law of drafts, measured unless the user has one."""
        law = read_law(
            self.config.law
            or self._once(
                "law", self._time(law_shapes(dict([prunable_shape(str(self.source))]))), ProfileConfig,
                models=[str(self.source)], law=True, k=2 * self.config.offsets - 1, **self._grid,
            )
        )  # fmt: skip
        first, mode, dtype = law.profiles[0], self.running["mode"], self.running["dtype"]
        if (first.mode, first.dtype) != (mode, dtype):
            raise UserError(f"--law {self.config.law}: measured {first.mode} in {first.dtype}, not {mode} in {dtype}")
        widest, needed = max(point.width for point in first.forward), 2 * self.config.offsets
        if self.config.parallel and widest < needed:
            raise UserError(
                f"--law {self.config.law}: its passes are at most {widest} wide, and --parallel needs {needed}; "
                f"measure one with draftlab profile --law --k {needed - 1}"
            )
        return law

    @cached_property
    def target_cost(self) -> CostModel:
        """Measured latency of the target."""
        return self._measured_cost(self.target)

    def _measured_cost(self, model: Path) -> CostModel:
        """Return the measured latency of the target or of a head."""
        models = {hub.checkpoint_name(path): path for path in (self.target, *self.config.heads.values())}
        profiles = self._once(
            "profile", self._time(models), ProfileConfig, models=list(map(str, models.values())), k=max(self.config.k),
            **self._grid,
        )  # fmt: skip
        return CostModel.of(read_profile(profiles / f"{hub.checkpoint_name(model)}.yaml"), extrapolate=True)

    def _time(self, models: Mapping[str, Path | Shape]) -> Callable[[Any, Output], object]:
        """Return what profiles these models, as a config says."""

        def time_passes(config: Any, output: Output) -> None:
            device = checkpoint.resolve_device(config.device)
            dtype = checkpoint.resolve_dtype(config.dtype, device)
            running = Running(device=device, dtype=dtype, mode=config.mode, threads=config.threads)
            timed = subjects(models)
            profile_models(timed, grid_of(timed, config.k, [1], config.context, config.repeats), running, output)

        return time_passes

    @property
    def _grid(self) -> dict[str, Any]:
        return {"context": [16, PROMPT_TOKENS + MAX_TOKENS + max(self.config.k)], "repeats": 8, **self.running}

    @property
    def _target_ms(self) -> float:
        return self._pass_ms(self.target_cost)

    def _pass_ms(self, cost: CostModel) -> float:
        return float(cost.forward_ms(1, 1, np.array(self.law.context)))

    def _wide_ms(self, shape: Shape) -> float:
        """Return the time of a parallel draft's pass after a step that accepted half of its tokens."""
        width, contexts = 3 * self.config.offsets // 2, np.array(self.law.context)
        return float(self._shape_cost(shape).forward_ms(width, 1, contexts))

    def _trial(self, search: Search, name: str) -> Trial:
        """Make one candidate, replay it, and price it; rung 0 only has heads to do."""
        number, steps, head = len(search.rungs) - 1, search.rungs[-1].steps, self.config.heads.get(name)
        texts = self._texts()
        stored = self._stored(steps) if steps else None
        start = time.time()
        most, target = self.config.offsets, None
        if head is not None:
            draft, most, target = head, max(self.config.k), self.target
        elif stored is None:
            draft = self._cut(name, search.shapes[name])
        else:
            draft = self._distilled(name, number, steps, stored)
        drafting = Drafting(
            k=most, rule="rejection", temperature=None, dtype=self._dtype, device=self._device, target=target
        )
        self._once(
            f"replay-{number}/{name}",
            lambda _, output: replay(read_store(texts), [drafter_of(draft)], drafting, output),
            ReplayConfig, directory=texts, draft=[str(draft)], k=[most], device=self.config.device,
            dtype=self.running["dtype"], **({} if target is None else {"target": str(target)}),
        )  # fmt: skip
        work, cost = self._workload(number, name), self._draft_cost(search, name)
        k, speedup, rate = best_k(cost, self.target_cost, work, self.config.k, 1)
        inside = np.arange(work.texts.chances.shape[1]) < work.texts.lengths[:, None]
        return Trial(
            name=name, k=k, length=chain(work.texts, k).acceptance().mean_acceptance_length, tokens_per_second=rate,
            speedup=speedup, rejection=float(1 - work.texts.chances[inside].mean()), draft_ms=self._pass_ms(cost),
            seconds=time.time() - start, step_seconds=_training_seconds(draft) / steps if steps else 0.0,
        )  # fmt: skip

    def _promise(self, search: Search, name: str, remaining: float) -> float:
        """Return tokens per second if this share of a candidate's rejections remains."""
        work = self._workload(len(search.rungs) - 1, name)
        learnt = work.with_chances(1 - remaining * (1 - work.texts.chances))
        return best_k(self._draft_cost(search, name), self.target_cost, learnt, self.config.k, 1)[2]

    def _workload(self, rung: int, name: str) -> Workload:
        draft = hub.checkpoint_name(self.draft(name, rung))
        return workload_of_replay(read_replay(self.output.state / f"replay-{rung}" / name / draft))

    def _draft_cost(self, search: Search, name: str) -> CostModel:
        if name in search.heads:
            return self._measured_cost(self.config.heads[name])
        return self._shape_cost(search.shapes[name])

    def _shape_cost(self, shape: Shape) -> CostModel:
        return CostModel.of(self.law.profile(shape, ""), extrapolate=True)

    def _cut(self, name: str, wanted: Shape) -> Path:
        sizes = wanted.model_dump(include={"layers", "hidden", "heads", "kv_heads", "ffn", "draft_vocab"})
        text = Text(
            data=self.config.data, outputs=self.config.outputs, tokens=CALIBRATION_TOKENS, seq_len=SEQ_LEN,
            seed=self.config.seed,
        )  # fmt: skip
        scores = self.output.state / "calibration.safetensors"

        def cut(_: object, output: Output) -> None:
            have = checkpoint.planned_shape(self.source)
            shape = have.model_copy(update=sizes)
            source = Source(directory=self.source, shape=have, device=checkpoint.resolve_device(self.config.device))
            check_cut(source.config, have, shape)
            prune(source, shape, output, text=text, refit=Refit(), scores_cache=scores)

        return self._once(
            f"rung-0/{name}", cut, PruneConfig, source=str(self.source), layers=wanted.layers, width=wanted.hidden,
            heads=wanted.heads, kv_heads=wanted.kv_heads, ffn=wanted.ffn, vocab=wanted.draft_vocab, **self._text,
            calibration_tokens=CALIBRATION_TOKENS, seq_len=SEQ_LEN, device=self.config.device, seed=self.config.seed,
            scores_cache=scores,
        )  # fmt: skip

    @property
    def _device(self) -> torch.device:
        return checkpoint.resolve_device(self.config.device)

    @property
    def _dtype(self) -> torch.dtype:
        return checkpoint.resolve_dtype(self.running["dtype"], self._device)

    def _texts(self) -> Path:
        """Return the target's answers, to replay candidates on."""

        def write(_: object, output: Output) -> None:
            file, tokenizer, seed = self.config.prompt_file, checkpoint.load_tokenizer(self.target), self.config.seed
            if file is None:
                data, count = self.config.data, REPLAYED_TEXTS
                prompts = data_prompts(data, tokenizer, count=count, tokens=PROMPT_TOKENS, seed=seed)
            else:
                prompts = file_prompts(file, tokenizer, count=REPLAYED_TEXTS, chat="auto")
            stops = checkpoint.eos_token_ids(self.target)
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=seed, stop_token_ids=stops)
            answers = Answers(prompts=prompts, use="replay", sampling=sampling, seed=seed)
            target = LocalTarget(self.target, self._device, self._dtype, batch_size=REPLAY_BATCH)
            build(target, answers, 0, output, [] if file is None else [file])

        return self._once(
            "texts", write, OutputsBuildConfig, use="replay", target=str(self.target), **self._prompts,
            num_prompts=REPLAYED_TEXTS, max_new_tokens=MAX_TOKENS, seed=self.config.seed, device=self.config.device,
            dtype=self.running["dtype"],
        )  # fmt: skip

    def _stored(self, steps: int) -> Path:
        """Return rows of data with the target's log-probabilities, to distil candidates from."""
        if self.config.outputs is not None:
            return self.config.outputs
        count, data, seed = steps * self.config.batch_size, self.config.data, self.config.seed

        def write(_: object, output: Output) -> None:
            rows = Rows(data=data, count=count, seq_len=SEQ_LEN, seed=seed)
            build(LocalTarget(self.target, self._device), rows, min(TOP_LOGPROBS, known_ids(self.target)), output, [])

        return self._once(
            f"outputs-{steps}", write, OutputsBuildConfig, target=str(self.target), data=data, num_sequences=count,
            seq_len=SEQ_LEN, top_logprobs=TOP_LOGPROBS, device=self.config.device, seed=seed,
        )  # fmt: skip

    def _distilled(self, name: str, rung: int, steps: int, stored: Path) -> Path:
        config, draft = self.config, self.draft(name, 0)
        student = "draft" if config.offsets == 1 else f"parallel:tokens={config.offsets}"
        job = Distillation(
            student=parse_student(student), draft=draft, target=None, outputs=stored,
            text=TrainingText(data=config.data, shares={"data": 1.0}, seq_len=SEQ_LEN),
            loop=Loop(
                steps=steps, lr=config.lr, batch_size=config.batch_size, eval_steps=steps, save_steps=steps,
                seed=config.seed,
            ),
            hardware=Hardware(device=config.device),
        )  # fmt: skip
        return self._once(
            f"rung-{rung}/{name}", lambda _, output: distill(job, output), DistillConfig, student=student,
            draft=str(draft), outputs=stored, steps=steps, batch_size=config.batch_size, lr=config.lr,
            eval_steps=steps, save_steps=steps, device=config.device, seed=config.seed,
        )  # fmt: skip

    def _once(
        self, name: str, function: Callable[[Any, Output], object], config: type[OutputConfig], **settings: object
    ) -> Path:
        """Call a library function whose output is not there yet."""
        out = self.output.state / name
        if provenance.read_record(out) is None:
            built = config.build({**settings, "out": out})
            function(built, Output(command=name.partition("/")[0], config=built, out=out))
        return out


def _training_seconds(draft: Path) -> float:
    record = provenance.read_record(draft)
    assert record is not None
    return float(str(record.notes["seconds"]))
