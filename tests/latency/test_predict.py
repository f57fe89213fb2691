"""The prediction is the engine's own time, when every pass costs what the profile says."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build
from plain_eagle import target_and_head
from test_cost_model import SHAPE, latency
from typer.testing import CliRunner

from draftlab.acceptance.chain_logprobs import score_chains
from draftlab.acceptance.token_logprobs import Text, score_offsets, score_tokens
from draftlab.cli import app
from draftlab.engine.drafters.eagle import EagleDrafter
from draftlab.engine.drafters.parallel import ParallelDrafter
from draftlab.engine.generate import ModelDrafter, Step, decode, speculative_decode
from draftlab.errors import UserError
from draftlab.latency.cost_model import (
    CostModel,
    Point,
    Profile,
    SteadyPoint,
    expected_tokens,
    write_profile,
)
from draftlab.latency.predict import REMEDIES, predict, required_length, verdict
from draftlab.latency.steps import TimeSplit, expected_time, step_costs, steps
from draftlab.latency.workload import Workload, constant_workload, workload_of, workload_of_score
from draftlab.model import llama
from draftlab.model.eagle_llama import EagleLlama
from draftlab.results.decoding import Generation
from draftlab.results.score import Conditions, Model, Score
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.replay import Replay, ReplayedText

KS = (1, 2, 3, 5)
PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250, 31, 66, 2, 8], [0, 90, 91, 92, 93, 7]]
NEW = 40
Law = Callable[[int, float, int], float]  # width, context, like passes before it -> ms
SETTLED = 2


def law(base: float, per_token: float, per_context: float, turn: float, settled: int = 1) -> Law:
    """turn: what a pass costs more behind other work, and less of it behind each of settled like passes."""
    return lambda width, context, behind: (
        base
        + per_token * width
        + per_context * context
        + turn * (1 - min(behind, settled) / settled)
    )


TARGET, DRAFT = law(4.0, 0.5, 0.02, 0.7), law(0.8, 0.1, 0.004, 0.3, SETTLED)
FREE_HOST = [latency(1, 0.0), latency(9, 0.0)]


def profile(name: str, of: Law, host: list = FREE_HOST, batches: tuple[int, ...] = (1,)) -> Profile:
    def point(width: int, batch: int, context: int, behind: int) -> Point:
        found = latency(width, batch * of(width, context, behind))
        return Point(**found.model_dump(), batch=batch, context=context)

    places = [(b, c) for b in batches for c in (0, 100)]
    return Profile(
        kind="measured", name=name, sha256=None, shape=SHAPE, device="here", dtype="float32", mode="eager", threads=1,
        forward=[point(w, *at, 0) for w in range(1, 10) for at in places],
        steady=[SteadyPoint(**point(1, *at, n).model_dump(), after=n) for n in range(1, SETTLED + 1) for at in places],
        prefill=[latency(n, of(n, 0, 0)) for n in (1, 100)], host=host, bandwidth_gbs=10,
        matmul_tflops={"float32": 0.1}, command="", versions={}, created="",
    )  # fmt: skip


def pair(
    draft: Law = DRAFT, target: Law = TARGET, host: list = FREE_HOST
) -> tuple[CostModel, CostModel]:
    return CostModel.of(profile("draft", draft, host)), CostModel.of(
        profile("target", target, host)
    )


class Meter:
    """The seconds of a run in which every pass of a metered model costs what its law says."""

    def __init__(self) -> None:
        self.seconds, self.last, self.like = 0.0, None, 0

    def __call__(self) -> float:
        return self.seconds


class Metered(llama.Llama):
    """A model that adds to a meter what its passes cost, by what really goes through them."""

    meter: Meter
    law: Law

    def forward(self, ids, cache, last=0, tree=None):
        self.pay(ids, cache)
        return super().forward(ids, cache, last, tree)

    def pay(self, ids, cache):
        self.meter.like = self.meter.like + 1 if self.meter.last is self else 0
        drafts_prompt = self.law is DRAFT and not cache.used[0]
        # predict takes its first step for one like all
        self.meter.last = None if drafts_prompt else self
        behind = self.meter.like if ids.shape[1] == 1 else 0
        self.meter.seconds += self.law(ids.shape[1], cache.used[0], behind) / 1e3


def metered(meter: Meter, of: Law, noise: float, folder: Path) -> Metered:
    """The same model for everyone, but for noise in its weights."""
    model = build("llama", 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.save_pretrained(folder)
    found = llama.load(folder, torch.float32)
    found.__class__ = Metered
    found.meter, found.law = meter, of
    return found


def texts_of_runs(runs: list[list[Step]]) -> list[Text]:
    tokens = [np.array([t for step in run for t in step.tokens]) for run in runs]
    return [(np.array(prompt), text) for prompt, text in zip(PROMPTS, tokens, strict=True)]


@pytest.fixture
def ran(tmp_path):
    """Every prompt decoded by the engine on a meter, by K: its steps; and the workload that a replay makes of it."""
    meter = Meter()
    target, draft = (
        metered(meter, TARGET, 0.0, tmp_path / "target"),
        metered(meter, DRAFT, 0.07, tmp_path / "draft"),
    )
    sampling = SamplingParams(max_tokens=NEW)
    runs: dict[int, list[list[Step]]] = {
        0: [list(decode(target, [p], sampling, meter)) for p in PROMPTS]
    }
    for k in KS:
        runs[k] = [
            list(speculative_decode(target, ModelDrafter(draft), [p], k, sampling, meter))
            for p in PROMPTS
        ]
    texts = texts_of_runs(runs[0])
    chances = [
        (one.ranks == 0).astype(float)[1:]
        for one in score_tokens(draft, texts, 307, SamplingParams())
    ]
    return runs, workload_of(chances, [len(p) for p in PROMPTS])


def same_times(spent: TimeSplit, runs: list[list[Step]]) -> None:
    """Compare the predicted times with the metered steps after each prefill."""
    for i, (_, *decoded) in enumerate(runs):
        for part in ("draft", "verify"):
            seconds = sum(getattr(step, f"{part}_seconds") for step in decoded)
            assert getattr(spent, part)[i] == pytest.approx(1e3 * seconds, rel=1e-9)


def test_predicted_time_is_the_engines_on_a_metered_clock(ran):
    """With catching up, growing contexts, short last steps and the turns between models, without both prefills."""
    runs, work = ran
    draft, target = pair()
    paid = step_costs(draft, target, work, max(KS), 1)
    accepted = sum(s.accepted for run in runs[1] for s in run)
    assert 5 < accepted < 100  # else nothing below is tried
    for k in (0, *KS):
        spent = expected_time(paid, work.prompt_tokens, steps(work, k))
        same_times(spent, runs[k])
        for i, run in enumerate(runs[k]):
            assert run[0].draft_seconds == pytest.approx(
                DRAFT(len(PROMPTS[i]), 0, 0) / 1e3 if k else 0
            )


def test_predicted_time_of_a_parallel_draft_is_the_engines_on_a_metered_clock(tmp_path):
    """Passes over the accepted tokens and the mask tokens, up to 2 K wide, behind growing contexts."""
    meter = Meter()
    target, draft = (
        metered(meter, TARGET, 0.0, tmp_path / "target"),
        metered(meter, DRAFT, 0.03, tmp_path / "draft"),
    )
    draft.pard_token, sampling, ks = 2, SamplingParams(max_tokens=NEW), (1, 3, 4)
    plain = [list(decode(target, [p], sampling, meter)) for p in PROMPTS]
    texts = texts_of_runs(plain)
    scored = score_offsets(
        llama.load(tmp_path / "draft", torch.float32), texts, 307, SamplingParams(), 4, 2
    )
    work = workload_of(
        [np.exp(one.logprobs)[1:] for one in scored], [len(p) for p in PROMPTS], kind="parallel"
    )
    paid = step_costs(*pair(), work, max(ks), 1)
    for k in ks:
        spent = expected_time(paid, work.prompt_tokens, steps(work, k))
        runs = [
            list(speculative_decode(target, ParallelDrafter(draft), [p], k, sampling, meter))
            for p in PROMPTS
        ]
        assert sum(s.accepted for run in runs for s in run) > 5
        same_times(spent, runs)
    assert predict(*pair(), work, ks).best.k in ks


class MeteredHead(EagleLlama):
    """As Metered."""

    meter: Meter

    def step(self, ids, states, cache, last, tree=None):
        Metered.pay(self, ids, cache)
        return super().step(ids, states, cache, last, tree)


def test_predicted_time_of_an_eagle_head_is_the_engines_on_a_metered_clock(tmp_path):
    """Its first pass of a step reads what was accepted, its others a token each; the prompt's pass comes first."""
    meter = Meter()
    target, head = target_and_head(tmp_path)
    for model, kind, of in ((target, Metered, TARGET), (head, MeteredHead, DRAFT)):
        model.__class__ = kind
        model.meter, model.law = meter, of
    sampling, ks = SamplingParams(max_tokens=NEW), (1, 3, 4)
    plain = [list(decode(target, [p], sampling, meter)) for p in PROMPTS]
    texts = texts_of_runs(plain)
    scored = score_chains(target, head, texts, 307, SamplingParams(), 4)
    work = workload_of([np.exp(one.logprobs)[1:] for one in scored], [len(p) for p in PROMPTS])
    work = dataclasses.replace(work, kind="eagle")
    paid = step_costs(*pair(), work, max(ks), 1)
    for k in ks:
        spent = expected_time(paid, work.prompt_tokens, steps(work, k))
        runs = [
            list(speculative_decode(target, EagleDrafter(target, head), [p], k, sampling, meter))
            for p in PROMPTS
        ]
        assert sum(s.accepted for run in runs for s in run) > 5
        same_times(spent, runs)
    assumed = dataclasses.replace(constant_workload(0.5, tokens=50, prompt_tokens=9), kind="eagle")
    for row in predict(*pair(), assumed, ks).rows:
        assert row.tokens_per_pass.value == pytest.approx(expected_tokens(0.5, row.k), rel=0.05)


def test_speedup_is_a_ratio_of_sums_over_texts(ran):
    runs, work = ran
    found = predict(*pair(), work, KS)
    for row in found.rows:
        seconds = {
            k: sum(s.draft_seconds + s.verify_seconds for run in runs[k] for s in run[1:])
            for k in (0, row.k)
        }
        assert row.speedup.value == pytest.approx(seconds[0] / seconds[row.k], rel=1e-9)
        assert row.speedup.low <= row.speedup.value <= row.speedup.high
        emitted = sum(len(s.tokens) for run in runs[row.k] for s in run[1:])
        assert row.tokens_per_second == pytest.approx(emitted / seconds[row.k], rel=1e-9)


def test_ignoring_growth_turns_or_catching_up_would_be_seen(ran):
    """The test above can fail: each of these is worth more than it allows."""
    _, work = ran
    exact = {row.k: row.speedup.value for row in predict(*pair(), work, KS).rows}
    flat = {row.k: row.closed_form_speedup for row in predict(*pair(), work, KS).rows}
    still = pair(law(0.8, 0.1, 0.004, 0.0), law(4.0, 0.5, 0.02, 0.0))
    turnless = {row.k: row.speedup.value for row in predict(*still, work, KS).rows}
    assert all(abs(turnless[k] / exact[k] - 1) > 0.02 for k in KS)
    assert all(abs(flat[k] / exact[k] - 1) > 2e-3 for k in KS)


def test_a_text_that_ends_by_itself_drafts_past_its_end(ran):
    _, work = ran
    lengths = work.texts.lengths
    ended = Workload(
        texts=dataclasses.replace(work.texts, limits=lengths + 20), prompt_tokens=work.prompt_tokens
    )
    paid = step_costs(*pair(), ended, 5, 1)
    cut, free = (
        expected_time(paid, work.prompt_tokens, steps(w, 5)).draft.sum() for w in (work, ended)
    )
    assert free > cut


def test_texts_of_one_token_predict_nothing():
    with pytest.raises(UserError):
        predict(*pair(), workload_of([np.array([])], [5]), KS)


def test_host_time_counts_per_drafted_token_and_per_step():
    work = constant_workload(0.6, tokens=60, prompt_tokens=10)
    free, dear = (
        predict(*pair(host=host), work, [4])
        for host in (FREE_HOST, [latency(1, 0.4), latency(9, 1.2)])
    )
    passes = work.texts.lengths.sum() / free.rows[0].tokens_per_pass.value
    more = 1e3 * 59 * (1 / dear.rows[0].tokens_per_second - 1 / free.rows[0].tokens_per_second)
    assert more == pytest.approx(passes * (4 * 0.4 + 0.8), rel=0.05)
    assert dear.rows[0].shares["host"] > 0 == free.rows[0].shares["host"]


def test_a_batch_is_as_fast_as_its_rows_together():
    slow, fast = (
        CostModel.of(profile("m", TARGET, batches=(1, 8))),
        CostModel.of(profile("d", DRAFT, batches=(1, 8))),
    )
    work = constant_workload(0.6, tokens=40, prompt_tokens=10)
    one, eight = (predict(fast, slow, work, [2], batch) for batch in (1, 8))
    # passes cost 8 times as much
    assert eight.rows[0].tokens_per_second == pytest.approx(one.rows[0].tokens_per_second)
    assert len(eight.notes) == 1
    assert "host" in eight.notes[0]


def test_what_a_slower_draft_would_need_is_what_makes_it_as_fast():
    work = constant_workload(0.6, tokens=80, prompt_tokens=8)
    fast = predict(*pair(), work, KS)
    dearer = law(1.4, 0.1, 0.004, 0.3)
    slow = predict(*pair(dearer), work, KS)
    k, length = required_length(slow, fast.best.speedup.value) or (0, 0.0)
    alpha = next(a for a in np.linspace(0.6, 1, 4001) if expected_tokens(a, k) >= length)
    again = predict(*pair(dearer), constant_workload(alpha, tokens=80, prompt_tokens=8), KS)
    assert next(row for row in again.rows if row.k == k).speedup.value == pytest.approx(
        fast.best.speedup.value, rel=0.02
    )
    assert (
        required_length(predict(*pair(law(9, 0, 0, 0)), work, KS), fast.best.speedup.value) is None
    )


QUICK, BUSY = law(0.1, 0.0, 0.0, 0.0), [latency(1, 0.0), latency(9, 20.0)]


@pytest.mark.parametrize(
    ("draft", "target", "host", "alpha", "opening", "limit"),
    [
        (law(2.0, 0.1, 0.0, 0.0), TARGET, FREE_HOST, 0.9, "Faster", "draft"),
        (QUICK, TARGET, FREE_HOST, 0.5, "Faster", "acceptance"),
        (QUICK, law(0.1, 3.0, 0.0, 0.0), FREE_HOST, 0.9, "Slower", "verify"),
        (QUICK, law(4.0, 0.0, 0.0, 0.0), BUSY, 0.98, "Faster", "host"),
    ],
)
def test_the_verdict_names_what_limits_the_pair(draft, target, host, alpha, opening, limit):
    costs = CostModel.of(profile("draft", draft)), CostModel.of(profile("target", target, host))
    words = verdict(
        predict(*costs, constant_workload(alpha, tokens=60, prompt_tokens=10), range(1, 5))
    )
    assert words.startswith(opening), words
    assert REMEDIES[limit] in words, words


def score_of(runs: dict[int, list[list[Step]]]) -> Score:
    generations = {
        k: [_generation(i, run) for i, run in enumerate(each)] for k, each in runs.items()
    }
    model = Model(name="m", sha256="", shape=SHAPE, latency=[latency(1, 1.0)], tasks=[])
    conditions = Conditions(
        device="here", dtype="float32", target_weights="float32", draft_weights="float32", mode="eager", threads=1,
        temperature=0, data="", prompts=3, prompt_tokens=6,
        max_tokens=NEW, repeats=1, context=20, seed=0,
    )  # fmt: skip
    return Score(
        name="d", target=model, draft=model, conditions=conditions, plain=generations[0],
        speculative={k: generations[k] for k in KS}, equal_texts=1.0, distinct_4grams=1, command="", versions={},
        created="",
    )  # fmt: skip


def _generation(prompt: int, run: list[Step]) -> Generation:
    return Generation(
        prompt=prompt, tokens=sum(len(s.tokens) for s in run), drafted=[s.drafted for s in run[1:]],
        accepted=[s.accepted for s in run[1:]], emitted=[len(s.tokens) for s in run[1:]], prefill_seconds=1,
        draft_seconds=0, verify_seconds=1, host_seconds=0,
    )  # fmt: skip


def test_a_score_gives_back_the_steps_that_it_counted(ran):
    runs, work = ran
    score = score_of(runs)
    found = workload_of_score(score)
    known = (found.texts.chances == 0) | (found.texts.chances == 1)
    assert (found.texts.chances[known] == work.texts.chances[known]).all()
    for k in KS:
        assert steps(found, k).starts.sum() == pytest.approx(
            sum(len(run) - 1 for run in runs[k]), rel=0.02
        )
    # of the largest K only, as when sampling
    alone = workload_of_score(score.model_copy(update={"equal_texts": None}))
    assert steps(alone, 5).starts.sum() == sum(len(run) - 1 for run in runs[5])


def call(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, ["predict", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Profiles of a pair, as options, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    write_profile(profile("draft", DRAFT, batches=(1, 4)), tmp_path / "draft.yaml")
    write_profile(profile("target", TARGET, batches=(1, 4)), tmp_path / "target.yaml")
    return ("--draft-profile", "draft.yaml", "--target-profile", "target.yaml")


def test_predicting_as_typed_from_an_assumed_length(files):
    options = (*files, "--context", "16", "--max-new-tokens", "60", "--k", "1-6")
    found = json.loads(call(*options, "--acceptance", "2.5@4", "--json").stdout)["predictions"][0]
    row = next(row for row in found["rows"] if row["k"] == 4)
    assert row["tokens_per_pass"]["value"] == pytest.approx(2.5, rel=0.02)
    assert found["best_k"] == max(found["rows"], key=lambda row: row["speedup"]["value"])["k"]
    shown = call(*options, "--acceptance", "2.5@4", "--batch", "1,4").stdout
    assert "(predicted)" in shown
    assert len(re.findall(r"\(predicted\)", shown)) >= 1


def test_predicting_as_typed_from_a_replay_and_from_a_score(files, ran, tmp_path):
    runs, work = ran
    texts = [
        ReplayedText(
            number=i, category="", prompt_tokens=int(prompt), finish_reason="length", chances=[0.0, *row],
            distinct_4grams=1,
        )
        for i, (prompt, row) in enumerate(zip(work.prompt_tokens, work.texts.chances.tolist(), strict=True))
    ]  # fmt: skip
    sampling = SamplingParams(max_tokens=NEW)
    replay = Replay(
        draft="d", draft_sha256="", dtype="float32", target="t", target_sha256=None, outputs_sha256="",
        tokenizer_sha256="", sampling=sampling, rule="rejection", draft_temperature=0, texts=texts, command="",
        versions={}, created="",
    )  # fmt: skip
    (tmp_path / "replay.json").write_text(replay.model_dump_json())
    (tmp_path / "score.json").write_text(score_of(runs).model_dump_json())
    exact = {row.k: row.speedup.value for row in predict(*pair(), work, KS).rows}
    for source in ("replay", "score"):
        out = json.loads(
            call(
                *files, "--acceptance", tmp_path / f"{source}.json", "--k", "1,2,3,5", "--json"
            ).stdout
        )
        found = {row["k"]: row["speedup"]["value"] for row in out["predictions"][0]["rows"]}
        assert found == pytest.approx(exact, rel=1e-9 if source == "replay" else 0.02)
    for temperature, rule, said in (
        (0.0, "match", False),
        (0.8, "match", True),
        (0.8, "rejection", False),
    ):
        of_rule = {
            "rule": rule,
            "sampling": SamplingParams(max_tokens=NEW, temperature=temperature),
        }
        (tmp_path / "replay.json").write_text(replay.model_copy(update=of_rule).model_dump_json())
        out = call(
            *files, "--acceptance", tmp_path / "replay.json", "--for", "vllm", "--k", "1-3"
        ).stdout
        assert ("--rule match" in out) == said


def test_no_draft_is_a_row_and_is_marked_where_it_is_fastest(files, tmp_path):
    options = (*files, "--context", "16", "--max-new-tokens", "60")
    for alpha, marked in (("0.9", False), ("0.01", True)):
        shown = call(*options, "--acceptance", alpha, "--k", "3-4").stdout
        assert len(re.findall(r"^\* no draft +1\.00", shown, re.M)) == marked
        assert len(re.findall(r"^(\* )?no draft +1\.00", shown, re.M)) == 1
        assert bool(re.search(r"^\* [34] ", shown, re.M)) != marked
    write_profile(profile("slow", law(1.4, 0.1, 0.004, 0.3)), tmp_path / "slow.yaml")
    shown = call(*options, "--draft-profile", "slow.yaml", "--acceptance", "0.01").stdout
    assert re.findall(r"^\* (no draft|draft)", shown, re.M) == ["no draft"]


@pytest.mark.parametrize("options", [("--k", "9"), ("--context", "90"), ("--batch", "2,8")])
def test_what_lies_outside_the_profiles_is_refused(files, options):
    context = () if "--context" in options else ("--context", "16")
    result = call(
        *files, *context, "--acceptance", "0.5", "--max-new-tokens", "60", *options, code=1
    )
    assert re.search(r"\d+ to \d+", result.stderr)
