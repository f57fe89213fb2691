"""The command that closes the loop: shapes are cut, distilled, replayed, priced and measured; the fastest is kept."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from draftlab import workspace
from draftlab.commands.latency import law as measure_law
from draftlab.commands.latency import profile
from draftlab.commands.outputs import build, replay
from draftlab.commands.prune import prune
from draftlab.commands.score import score
from draftlab.commands.shared import (
    Data,
    DryRun,
    Force,
    Out,
    Outcome,
    PassMode,
    Seed,
    TargetName,
    Threads,
    WeightsDtype,
    plan,
    recorded,
    shape_of,
    table_of,
)
from draftlab.commands.train import distill
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.model.shape import Shape, format_count, parse_count, parse_numbers, resolve
from draftlab.search.schedule import KEPT, Confirmed, Rung, Search, Trial, read_search, write_search

if TYPE_CHECKING:
    from rich.table import Table

    from draftlab.latency.cost_model import CostModel
    from draftlab.latency.scaling_law import ScalingLaw

CALIBRATION_TOKENS = 8192
SEQ_LEN = 256
LISTED = 64  # most probable tokens of the target that are kept to distil from
SCORED_SHARE = 0.25  # of the minutes is kept to measure the leaders
REPLAYED_TEXTS, PROMPT_TOKENS, NEW_TOKENS = 48, 64, 96
# Share of the rejections that distilling on will leave, by rung: without it the cheapest win while none is any good.
# 3 x 256, 4 x 192 and 12 x 128 of tiny: 0.61 to 0.64 from the cut to 180 or 240 steps (docs/results.md)
HOPED = (0.63, 0.8, 1.0)


def search(
    minutes: Annotated[float, Option(min=0, help="Time to spend, about.")] = 15,
    layers: Annotated[str | None, Option(help="Depths to try, as 1,2,4; 1 to half the source's if left out.")] = None,
    widths: Annotated[str | None, Option(help="Widths to try; half to all of the source's if left out.")] = None,
    params: Annotated[
        str | None, Option(help="Or of each depth the shape with so many parameters: 1.3b, 796m, 4m.")
    ] = None,
    against: Annotated[
        list[str] | None, Option(help="Shape file or its name to take to the end and compare with; again for each.")
    ] = None,
    k: Annotated[str, Option(help="Numbers of drafted tokens.")] = "1-6",
    target: TargetName = None,
    source: Annotated[str | None, Option(help="Checkpoint to cut from; the workspace's if left out.")] = None,
    data: Data = None,
    law: Annotated[
        Path | None, Option(help="Folder of profiles that draftlab law measured; measured first if left out.")
    ] = None,
    first_steps: Annotated[int, Option(min=1, help="Steps of distillation on the first rung.")] = 30,
    most_steps: Annotated[int, Option(min=1, help="Most steps on the last.")] = 1000,
    rows: Annotated[int, Option(min=1, help="Sequences per step.")] = 8,
    lr: Annotated[float, Option(help="Peak learning rate, of Muon.")] = 4.0e-3,
    finalists: Annotated[int, Option(min=1, help="Leaders to measure.")] = 2,
    prompts: Annotated[int, Option(min=2, help="Prompts that leaders are measured on.")] = 16,
    dtype: WeightsDtype = None,
    mode: PassMode = "eager",
    threads: Threads = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> Outcome:
    """Find the shape and K with which the target is fastest here; a killed search goes on where it stopped."""
    arguments, began = recorded(locals())
    space = workspace.load()
    whose = hub.locate(target or space.target, weights=not dry_run)
    origin = hub.locate(source or space.source, weights=not dry_run)
    text = hub.check_data(data or space.data)

    from draftlab import provenance
    from draftlab.files import claim_state, state_directory
    from draftlab.model import checkpoint
    from draftlab.model.decoder import check_mode
    from draftlab.model.size import read_size
    from draftlab.model.tokenizer import common_vocabulary
    from draftlab.search.schedule import default_depths

    common_vocabulary(origin, whose)
    have, ks = checkpoint.planned_shape(origin), parse_numbers(k)
    depths = parse_numbers(layers) if layers else default_depths(have)
    shapes = _shapes(have, depths, widths, params)
    device = checkpoint.resolve_device(space.device)
    weights = checkpoint.resolve_dtype(dtype or space.dtype, device)
    check_mode(mode, device, weights)
    running = {"dtype": checkpoint.dtype_name(weights), "mode": mode, "threads": threads}
    given = dict(map(shape_of, against or []))
    out = out or space.runs / f"search-{hub.checkpoint_name(origin)}"
    checkpoint.check_free(out, force=force)
    if dry_run:
        tried = [f"{shape.layers} x {shape.hidden}" for shape in shapes]
        facts = {"target": read_size(whose).describe(), "source": have.describe(), "try": ", ".join(tried)}
        return plan(out, facts | {"compare with": ", ".join(given) or "nothing", "minutes": minutes})
    state = state_directory(out)
    inputs = {"source": provenance.fingerprint(origin), "target": provenance.fingerprint(whose)}
    claim_state(state, {name: value for name, value in arguments.items() if name != "minutes"} | {"inputs": inputs})
    work = Work(
        state=state, target=str(whose), source=str(origin), data=text, rows=rows, lr=lr, seed=seed,
        running=running, ks=ks, prompts=prompts, began=began, limit_seconds=60 * minutes,
    )  # fmt: skip
    priced = work.prices(law)
    found = work.start(have, shapes, given, priced)
    found = work.halve(found, priced, first_steps=first_steps, most_steps=most_steps, finalists=finalists)
    found = work.confirm(found)
    with checkpoint.new_directory(out, force=force) as made:
        shutil.copytree(work.draft(found.winner.name, len(found.rungs) - 1), made / "draft")
        for part in ("trace", "score"):
            shutil.copytree(state / part, made / part)
        write_search(found, made)
        provenance.write_record(made, "search", arguments, [whose, origin], began, seconds_in_all=found.spent_seconds)
    shutil.rmtree(state)
    lines = [_rung_table(found), *found.explain(), str(out / "draft")]
    return Outcome(path=out, show=lines, data={"path": str(out), **found.model_dump(mode="json")})


def _shapes(have: Shape, depths: list[int], widths: str | None, params: str | None) -> list[Shape]:
    """The depths, each in the source's proportions at every width, or at the width and ffn that meet a budget."""
    from draftlab.model.families import Budget, family
    from draftlab.search.schedule import default_widths

    if params is None:
        across = parse_numbers(widths) if widths else default_widths(have)
        return [resolve(have, layers=n, hidden=width) for n in depths for width in across]
    if widths is not None:
        raise UserError("give --widths or --params: a budget decides the widths")
    found = family(have, depths, Budget(amount=parse_count(params), kind="total"))
    if missing := sorted({*depths} - {shape.layers for shape in found}):
        note(f"no shape of {params} parameters has {', '.join(map(str, missing))} layers within the source")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What passes cost: the target's as measured, any draft's by the law."""

    law: "ScalingLaw"
    target: "CostModel"
    target_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The steps of a search, each of which is done once: what it made lies in state."""

    state: Path
    target: str
    source: str
    data: str
    rows: int
    lr: float
    seed: int
    running: dict[str, Any]  # how the engine runs: dtype, mode, threads
    ks: list[int]
    prompts: int
    began: float
    limit_seconds: float

    def prices(self, law: Path | None) -> Prices:
        """Profiles of the target and, unless there is one, a law: both at the contexts of the texts."""
        import numpy as np

        from draftlab.latency.cost_model import CostModel, read_profile
        from draftlab.latency.scaling_law import read_law

        contexts = f"16,{PROMPT_TOKENS + NEW_TOKENS + max(self.ks)}"
        here = {"context": contexts, "repeats": 8, **self.running}
        law = law or self._once("law", measure_law, source=self.source, **here)
        known = read_law(law)
        other, mine = known.profiles[0], self.running
        if (other.mode, other.dtype) != (mine["mode"], mine["dtype"]):
            raise UserError(
                f"{law} was measured {other.mode} in {other.dtype}; this search runs {mine['mode']} in {mine['dtype']}"
            )
        made = self._once("profile", profile, models=[self.target], k=max(self.ks), **here)
        measured = CostModel.of(read_profile(made), extrapolate=True)
        target_ms = float(measured.forward_ms(1, 1, np.array(known.context)))
        return Prices(law=known, target=measured, target_ms=target_ms)

    def start(self, have: Shape, tried: list[Shape], given: dict[str, Shape], priced: Prices) -> Search:
        """What an earlier try found, or rung 0 with every candidate on it."""
        from draftlab.search.schedule import FILE, candidates

        if (self.state / FILE).exists():
            return read_search(self.state)
        shapes = candidates(have, tried, priced.law.ms, priced.target_ms)
        same = {name: called for name, shape in shapes.items() for called, wanted in given.items() if shape == wanted}
        shapes = {same.get(name, name): shape for name, shape in shapes.items()} | given
        found = Search(target=self.target, source=self.source, shapes=shapes, given=list(given))
        return found.model_copy(update={"rungs": [Rung(steps=0, names=list(shapes))]})

    def halve(self, found: Search, priced: Prices, *, first_steps: int, most_steps: int, finalists: int) -> Search:
        """First all for a few steps, since a cut alone says little; then a third of them on each rung."""
        from draftlab.search.schedule import affordable_steps

        before = found.spent_seconds
        while True:
            rung = found.rungs[-1]
            for name in rung.left:
                trial = self._trial(found, name, priced)
                found = found.after(trial, before + time.time() - self.began)
                write_search(found, self.state)
            trying, number = len(rung.names) - len(found.given), len(found.rungs)
            if number > 2 and trying <= finalists:
                return found
            going = found.rungs[0].best_first() if number == 1 else found.best(max(finalists, -(-trying // KEPT)))
            steps = first_steps if number == 1 else KEPT * rung.steps
            if number > 1 and len(going) - len(found.given) <= finalists:
                left = (1 - SCORED_SHARE) * self.limit_seconds - found.spent_seconds
                steps = affordable_steps(left, going, rung.steps, fewest=first_steps, most=most_steps)
            found = found.next_rung(steps, going)
            note(f"rung {number}: {len(going)} drafts, {steps} steps each")
            write_search(found, self.state)

    def confirm(self, found: Search) -> Search:
        """The leaders measured beside each other, the fastest first."""
        from draftlab.results.compare import candidate_of, rank
        from draftlab.results.score import read_score

        last = found.rungs[-1]
        chosen = sorted({trial.k for trial in last.trials})
        made = self._once(
            "score", score, draft=[str(self.draft(name, len(found.rungs) - 1)) for name in last.names],
            target=self.target, data=self.data, k=",".join(map(str, chosen)),
            num_prompts=self.prompts, prompt_tokens=PROMPT_TOKENS, max_tokens=NEW_TOKENS, repeats=1, tasks="none",
            seed=self.seed + 1, **self.running,
        )  # fmt: skip
        places = rank([candidate_of(read_score(made / name)) for name in last.names])
        fastest = [
            Confirmed(
                name=place.candidate.name, k=place.candidate.k, length=place.candidate.tokens_per_pass,
                tokens_per_second=place.candidate.tokens_per_second, gain=place.candidate.speedup,
                against_fastest=place.ratio_to_fastest, changed=place.candidate.output_differs,
            )
            for place in places
        ]  # fmt: skip
        spent = found.spent_seconds + time.time() - self.began
        return found.model_copy(update={"confirmed": fastest, "spent_seconds": spent})

    def draft(self, name: str, rung: int) -> Path:
        return self.state / f"rung-{rung}" / name

    def _trial(self, found: Search, name: str, priced: Prices) -> Trial:
        """Make one candidate, replay it, price it."""
        from draftlab.acceptance.expected import chain
        from draftlab.latency.cost_model import CostModel
        from draftlab.latency.predict import best_k
        from draftlab.latency.workload import workload_of_replay
        from draftlab.target_outputs.replay import read_replay

        number, steps, shape = len(found.rungs) - 1, found.rungs[-1].steps, found.shapes[name]
        texts = self._once(
            "trace", build, use="replay", target=self.target, data=self.data, num_prompts=REPLAYED_TEXTS,
            prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS, seed=self.seed, dtype=self.running["dtype"],
        )  # fmt: skip
        cache = self._cache(steps) if steps else None
        began = time.time()
        draft = self._cut(name, shape) if cache is None else self._distilled(name, number, steps, cache)
        replayed = self._once(
            f"replay-{number}/{name}", replay, directory=texts, draft=[str(draft)], k="1",
            dtype=self.running["dtype"],
        )  # fmt: skip
        cost = CostModel.of(priced.law.profile(shape, name), extrapolate=True)
        work = workload_of_replay(read_replay(replayed / name))
        hoped = work.with_chances(1 - HOPED[min(number, 2)] * (1 - work.texts.chances))
        k, speedup, rate = best_k(cost, priced.target, hoped, self.ks, 1)
        return Trial(
            name=name, k=k, length=chain(work.texts, k).acceptance().mean_acceptance_length, tokens_per_second=rate,
            speedup=speedup, draft_ms=priced.law.ms(shape), seconds=time.time() - began,
            step_seconds=_training_seconds(draft) / steps if steps else 0.0,
        )  # fmt: skip

    def _cut(self, name: str, shape: Shape) -> Path:
        sizes = {"layers": shape.layers, "width": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads}
        return self._once(
            f"rung-0/{name}", prune, source=self.source, **sizes, ffn=shape.ffn, data=self.data,
            tokens=CALIBRATION_TOKENS, seq_len=SEQ_LEN, scores_cache=self.state / "calibration.safetensors",
            seed=self.seed,
        )  # fmt: skip

    def _cache(self, steps: int) -> Path:
        return self._once(
            f"cache-{steps}", build, target=self.target, data=self.data, num_sequences=steps * self.rows,
            seq_len=SEQ_LEN,
            top_logprobs=LISTED, seed=self.seed,
        )  # fmt: skip

    def _distilled(self, name: str, rung: int, steps: int, cache: Path) -> Path:
        return self._once(
            f"rung-{rung}/{name}", distill, draft=str(self.draft(name, 0)), outputs=cache, steps=steps,
            batch_size=self.rows, lr=self.lr, eval_steps=steps, save_steps=steps, seed=self.seed,
        )  # fmt: skip

    def _once(self, name: str, command: Callable[..., Outcome], **arguments: object) -> Path:
        """Run a command whose output is not there yet."""
        from draftlab import provenance

        out = self.state / name
        if provenance.read_record(out) is None:
            command(out=out, **arguments)
        return out


def _training_seconds(draft: Path) -> float:
    from draftlab import provenance

    record = provenance.read_record(draft)
    assert record is not None
    return float(str(record.notes["seconds"]))


def _rung_table(found: Search) -> "Table":
    """Every candidate as far as it came."""
    table = table_of(
        f"{Path(found.target).name}: candidates cut from {Path(found.source).name}, the fastest marked",
        ("shape", "para-\nmeters", "ms per\npass", "steps", "K", "tokens\nper pass", "pre-\ndicted", "measured"),
    )
    measured = {one.name: one for one in found.confirmed}
    shown: set[str] = set()
    for rung in reversed(found.rungs):
        for trial in rung.best_first():
            if trial.name in shown:
                continue
            shown.add(trial.name)
            one = measured.get(trial.name)
            cell = f"{one.gain.value:.2f}x ({one.gain.low:.2f} to {one.gain.high:.2f})" if one else ""
            best = one is not None and one is found.winner
            table.add_row(
                f"* {trial.name}" if best else trial.name, format_count(found.shapes[trial.name].params()),
                f"{trial.draft_ms:.3g}", str(rung.steps), str(trial.k), f"{trial.length:.2f}", f"{trial.speedup:.2f}x",
                cell, style="bold green" if best else None,
            )  # fmt: skip
    table.caption = (
        f"{found.spent_seconds / 60:.1f} minutes. Predicted by replay and the latency law, at the best K; those "
        "that were left early as if distilled further."
    )
    return table
