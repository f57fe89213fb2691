"""The prediction is the engine's own time, when every pass costs what the profile says."""

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.builders import build, generation_of
from helpers.latencies import latency, profile_of
from helpers.plain_eagle import target_and_head
from helpers.scores import change, conditioned, score
from helpers.typed import call

from draftlab.acceptance.expected import texts_of
from draftlab.acceptance.token_logprobs import score_offsets, score_tokens
from draftlab.drafters.lookup import PromptLookupDrafter, score_copies
from draftlab.drafters.parallel import ParallelDrafter
from draftlab.engine.generate import Drafter, ModelDrafter, Step, decode, speculative_decode
from draftlab.heads.eagle3.decoder import EagleLlama
from draftlab.heads.eagle3.drafter import EagleDrafter, score_chains
from draftlab.latency.cost_model import CostModel, Profile, alpha_for, write_profile
from draftlab.latency.predict import LatencyPrediction, predict, required_length
from draftlab.latency.steps import expected_time, step_costs, steps
from draftlab.latency.workload import Workload, constant_workload, workload_of_score
from draftlab.model import llama
from draftlab.results.score import Score
from draftlab.sampling import SamplingParams
from draftlab.scoring.replay import Replay, ReplayedText

KS = (1, 2, 3, 5)
PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250, 31, 66, 2, 8], [0, 90, 91, 92, 93, 7]]
NEW = 40
Law = Callable[[int, float, int], float]  # width, context, like passes before it -> ms
SETTLED = 2


def law(base: float, per_token: float, per_context: float, turn: float, settled: int = 1) -> Law:
    """turn: what a pass costs more behind other work, and less of it behind each of settled like passes."""
    return lambda width, context, behind: (
        base + per_token * width + per_context * context + turn * (1 - min(behind, settled) / settled)
    )


TARGET, DRAFT = law(4.0, 0.5, 0.02, 0.7), law(0.8, 0.1, 0.004, 0.3, SETTLED)
FREE_HOST = [latency(1, 0.0), latency(9, 0.0)]


def profile(name: str, of: Law, host: list = FREE_HOST, batches: tuple[int, ...] = (1,)) -> Profile:
    return profile_of(
        lambda w, b, c, n: b * of(w, c, n),
        name=name,
        host=host,
        widths=range(1, 11),
        batches=batches,
        contexts=(0, 100),
        after=range(1, SETTLED + 1),
    )


def pair(draft: Law = DRAFT, target: Law = TARGET, host: list = FREE_HOST) -> tuple[CostModel, CostModel]:
    return CostModel.of(profile("draft", draft, host)), CostModel.of(profile("target", target, host))


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


class MeteredHead(EagleLlama):
    """As Metered."""

    meter: Meter
    law: Law

    def step(self, ids, states, cache, last, tree=None):
        Metered.pay(self, ids, cache)
        return super().step(ids, states, cache, last, tree)


@pytest.fixture(scope="module", params=["model", "parallel", "eagle"])
def ran(request, tmp_path_factory):
    """Return every prompt decoded on a meter, by K: its steps, and the workload of a replay of the same texts."""
    kind, folder, how = request.param, tmp_path_factory.mktemp("metered"), SamplingParams()
    drafter: Drafter
    if kind == "eagle":
        target, draft = target_and_head(folder)
        drafter = EagleDrafter(target, draft)
    else:
        for name, noise in (("target", 0.0), ("draft", 0.07 if kind == "model" else 0.03)):
            build("llama", 3, noise=noise).save_pretrained(folder / name)
        target, draft = (llama.load(folder / name, torch.float32) for name in ("target", "draft"))
        draft.pard_token = 2 if kind == "parallel" else None
        drafter = ModelDrafter(draft) if kind == "model" else ParallelDrafter(draft)
    meter = Meter()
    for model, costs in ((target, TARGET), (draft, DRAFT)):
        model.__class__ = MeteredHead if isinstance(model, EagleLlama) else Metered
        model.meter, model.law = meter, costs
    sampling = SamplingParams(max_tokens=NEW)
    runs = {0: [list(decode(target, [p], sampling, meter)) for p in PROMPTS]}
    for k in KS:
        runs[k] = [list(speculative_decode(target, drafter, [p], k, sampling, meter)) for p in PROMPTS]
        assert 5 < sum(s.accepted for run in runs[k] for s in run) < 100  # else nothing is tried
    tokens = [np.array([t for step in run for t in step.tokens]) for run in runs[0]]
    texts = [(np.array(prompt), text) for prompt, text in zip(PROMPTS, tokens, strict=True)]
    if kind == "model":
        scored = score_tokens(draft, texts, 307, how)
    elif kind == "parallel":
        scored = score_offsets(draft, texts, 307, how, max(KS), 2)
    else:
        scored = score_chains(target, draft, texts, 307, how, max(KS))
    hits = [np.exp(one.logprobs)[1:] for one in scored]
    prompts = np.array([len(p) for p in PROMPTS])
    return runs, Workload(texts=texts_of(hits), prompt_tokens=prompts, kind=kind)


of_a_model = pytest.mark.parametrize("ran", ["model"], indirect=True)


def test_predicted_time_is_the_engines_on_a_metered_clock(ran):
    """It covers catching up, growing contexts, short last steps and turns between models, but neither prefill."""
    runs, work = ran
    paid = step_costs(*pair(), work, max(KS), 1)
    for k in (0, *KS) if work.kind == "model" else KS:
        spent = expected_time(paid, work.prompt_tokens, steps(work, k))
        for i, (_, *decoded) in enumerate(runs[k]):
            for part in ("draft", "verify"):
                seconds = sum(getattr(step, f"{part}_seconds") for step in decoded)
                assert getattr(spent, part)[i] == pytest.approx(1e3 * seconds, rel=1e-9)


@of_a_model
def test_speedup_is_a_ratio_of_sums_over_texts(ran):
    runs, work = ran
    found = predict(*pair(), work, KS)
    for row in found.rows:
        seconds = {k: sum(s.draft_seconds + s.verify_seconds for run in runs[k] for s in run[1:]) for k in (0, row.k)}
        assert row.speedup.value == pytest.approx(seconds[0] / seconds[row.k], rel=1e-9)
        assert row.speedup.low <= row.speedup.value <= row.speedup.high
        emitted = sum(len(s.tokens) for run in runs[row.k] for s in run[1:])
        assert row.tokens_per_second == pytest.approx(emitted / seconds[row.k], rel=1e-9)


def test_host_time_counts_once_for_drafting_and_once_for_the_step():
    work = constant_workload(0.6, tokens=60, prompt_tokens=10)
    free, dear = (predict(*pair(host=host), work, [4]) for host in (FREE_HOST, [latency(1, 0.4), latency(9, 1.2)]))
    passes = work.texts.lengths.sum() / free.rows[0].tokens_per_pass.value
    more = 1e3 * 59 * (1 / dear.rows[0].tokens_per_second - 1 / free.rows[0].tokens_per_second)
    assert more == pytest.approx(passes * (0.4 + 0.8), rel=0.05)
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


def test_what_a_slower_draft_would_need_is_what_makes_it_as_fast():
    def predicted(alpha: float, *costs: CostModel) -> LatencyPrediction:
        return predict(*costs, constant_workload(alpha, tokens=80, prompt_tokens=8), KS)

    goal = predicted(0.6, *pair()).best.speedup.value
    dearer = pair(law(1.4, 0.1, 0.004, 0.3))
    slow = predicted(0.6, *dearer)
    k, length = required_length(slow, goal) or (0, 0.0)
    needed = {row.k: goal * row.break_even_length for row in slow.rows}
    least = min(alpha_for(length, k) for k, length in needed.items() if length <= k + 1)
    assert alpha_for(length, k) == pytest.approx(least, abs=1e-3)
    again = {row.k: row.speedup.value for row in predicted(least, *dearer).rows}
    assert again[k] == pytest.approx(goal, rel=0.02)
    assert required_length(predicted(0.6, *pair(law(9, 0, 0, 0))), goal) is None


QUICK, BUSY = law(0.1, 0.0, 0.0, 0.0), [latency(1, 0.0), latency(9, 20.0)]


@pytest.mark.parametrize(
    ("draft", "target", "host", "alpha", "limit"),
    [
        (law(2.0, 0.1, 0.0, 0.0), TARGET, FREE_HOST, 0.9, "draft"),
        (QUICK, TARGET, FREE_HOST, 0.5, "acceptance"),
        (QUICK, law(0.1, 3.0, 0.0, 0.0), FREE_HOST, 0.9, "verify"),
        (QUICK, law(4.0, 0.0, 0.0, 0.0), BUSY, 0.98, "host"),
    ],
)
def test_half_of_what_limits_a_pair_gains_most(draft, target, host, alpha, limit):
    costs = CostModel.of(profile("draft", draft)), CostModel.of(profile("target", target, host))
    work = constant_workload(alpha, tokens=60, prompt_tokens=10)
    halved = predict(*costs, work, range(1, 5)).halved
    assert max(halved, key=lambda loss: halved[loss]) == limit


def score_of(runs: dict[int, list[list[Step]]]) -> Score:
    by_k = {k: [generation_of(run, i) for i, run in enumerate(each)] for k, each in runs.items()}
    measured = {"plain": by_k[0], "speculative": {k: by_k[k] for k in KS}, "prompts": []}
    return conditioned(change(score("d"), **measured), prompts=3, prompt_tokens=6, max_tokens=NEW)


@of_a_model
def test_a_score_gives_back_the_steps_that_it_counted(ran):
    runs, work = ran
    scored = score_of(runs)
    found = workload_of_score(scored)
    known = (found.texts.chances == 0) | (found.texts.chances == 1)
    assert (found.texts.chances[known] == work.texts.chances[known]).all()
    for k in KS:
        assert steps(found, k).starts.sum() == pytest.approx(sum(len(run) - 1 for run in runs[k]), rel=0.02)
    # of the largest K only, as when sampling
    alone = workload_of_score(change(scored, equal_texts=None))
    assert steps(alone, 5).starts.sum() == sum(len(run) - 1 for run in runs[5])


ASSUMED = "--context 16 --max-new-tokens 60"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return the command on profiles of a pair, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    write_profile(profile("draft", DRAFT, batches=(1, 4)), tmp_path / "draft.yaml")
    write_profile(profile("target", TARGET, batches=(1, 4)), tmp_path / "target.yaml")
    return "predict --draft-profile draft.yaml --target-profile target.yaml"


def replayed_text(prompt_tokens: int, chances: list, drafted: list[int] | None = None) -> ReplayedText:
    return ReplayedText(
        number=0,
        category="",
        prompt_tokens=prompt_tokens,
        finish_reason="length",
        chances=chances,
        drafted=drafted,
        distinct_4grams=1,
    )


def replay_of(texts: list[ReplayedText], **changes: object) -> Replay:
    sampling = SamplingParams(max_tokens=NEW)
    replay = Replay(
        draft="d",
        draft_sha256="",
        dtype="float32",
        target="t",
        target_sha256=None,
        outputs_sha256="",
        tokenizer_sha256="",
        sampling=sampling,
        rule="rejection",
        draft_sampling=sampling,
        texts=texts,
        command="",
        versions={},
        created="",
    )
    return change(replay, **changes)


@of_a_model
def test_predicting_as_typed_from_a_replay_and_from_a_score(files, ran, tmp_path):
    runs, work = ran
    rows = zip(work.prompt_tokens, work.texts.chances.tolist(), strict=True)
    replay = replay_of([replayed_text(int(prompt), [0.0, *row]) for prompt, row in rows])
    (tmp_path / "replay.json").write_text(replay.model_dump_json())
    (tmp_path / "score.json").write_text(score_of(runs).model_dump_json())
    exact = {row.k: row.speedup.value for row in predict(*pair(), work, KS).rows}
    for source in ("replay", "score"):
        typed = f"{files} --acceptance {tmp_path / source}.json --k 1,2,3,5 --json"
        out = json.loads(call(typed).stdout)
        found = {row["k"]: row["speedup"]["value"] for row in out["predictions"][0]["rows"]}
        assert found == pytest.approx(exact, rel=1e-9 if source == "replay" else 0.02)


# every token occurs before, most of them behind other tokens
COPIED = [
    [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 6, 7, 8, 1, 2, 3],
    [9, 8, 9, 9, 8, 7, 9, 8, 9, 9, 8, 7, 1, 2, 7, 9],
]
PROMPT = 6  # tokens of each text that are its prompt


def lookup_replay(longest_k: int) -> Replay:
    """Return the replay of prompt lookup on the texts COPIED."""
    texts = [(np.array(text[:PROMPT]), np.array(text[PROMPT:])) for text in COPIED]
    scored = score_copies(PromptLookupDrafter(3), texts, 10, longest_k)
    rows = []
    for each in scored:
        assert each.drafted is not None
        rows.append(replayed_text(PROMPT, np.exp(each.logprobs).tolist(), each.drafted.tolist()))
    return replay_of(rows, draft="prompt-lookup", kind="prompt-lookup", offsets=longest_k)


def looked_up(text: list[int], k: int) -> list[int]:
    """Return the number of tokens that each target pass verifies if prompt lookup drafts up to k tokens."""
    widths = []
    at = PROMPT + 1  # the prefill emits a token
    while at < len(text):
        draft = PromptLookupDrafter(3).draft(text[:at], min(k, len(text) - at - 1))
        accepted = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
        widths.append(1 + len(draft))
        at += accepted + 1
    return widths


def test_a_drafter_without_a_model_costs_what_the_target_verifies(files, tmp_path):
    """Passes of one token are steady, wider passes are not; contexts cost nothing here."""
    target = law(4.0, 0.5, 0.0, 0.7)
    write_profile(profile("target", target), tmp_path / "target.yaml")
    (tmp_path / "replay.json").write_text(lookup_replay(5).model_dump_json())
    typed = "predict --target-profile target.yaml --acceptance replay.json --k 1-5 --json"
    (predicted,) = json.loads(call(typed).stdout)["predictions"]
    tokens = sum(len(text) - PROMPT - 1 for text in COPIED)
    for row in predicted["rows"]:
        widths = [width for text in COPIED for width in looked_up(text, row["k"])]
        assert 1 in widths
        assert max(widths) > 1  # else nothing is tried
        ms = sum(target(width, 0, SETTLED if width == 1 else 0) for width in widths)
        assert row["speedup"]["value"] == pytest.approx(tokens * target(1, 0, SETTLED) / ms)
        assert row["tokens_per_pass"]["value"] == pytest.approx(tokens / len(widths))
        assert row["shares"]["draft"] == predicted["c"] == 0
        assert row["free_draft"] == pytest.approx(row["speedup"]["value"])
    assert "draft" not in predicted["halved"]
    assert predicted["draft_model"] == "prompt-lookup"


def test_a_profile_is_asked_for_exactly_where_it_is_needed(files, tmp_path):
    (tmp_path / "lookup.json").write_text(lookup_replay(5).model_dump_json())
    (tmp_path / "model.json").write_text(replay_of([replayed_text(5, [0.0, 0.5, 0.5])]).model_dump_json())
    target = "predict --target-profile target.yaml --k 1-4"
    for missing in ("0.7", "2.8@4", "model.json"):
        result = call(f"{target} --acceptance {missing}", code=1)
        assert "--draft-profile" in result.output
        assert missing in result.output
    assert "--draft-profile" in call(f"{files} --acceptance lookup.json --k 1-4", code=1).output
    both = json.loads(call(f"{target} --acceptance lookup.json --acceptance lookup.json --json").stdout)
    assert len(both["predictions"]) == 2


def test_a_k_beyond_the_replay_is_an_error(files, tmp_path):
    (tmp_path / "replay.json").write_text(lookup_replay(3).model_dump_json())
    result = call("predict --target-profile target.yaml --acceptance replay.json --k 4", code=1)
    assert "--k 4" in result.output


@pytest.mark.parametrize(
    ("conversations", "n"),
    [
        (None, 3),  # every text is a conversation of its own
        ([7, 7, 8], 2),
        ([7, 7, 7], 1),
    ],
)
def test_an_interval_is_over_conversations_and_one_conversation_has_none(conversations, n, files, tmp_path):
    texts = [replayed_text(5, [0.0, alpha, alpha, alpha]) for alpha in (0.5, 0.7, 0.8)]
    if conversations is not None:
        texts = [change(text, conversation=i) for text, i in zip(texts, conversations, strict=True)]
    (tmp_path / "replay.json").write_text(replay_of(texts).model_dump_json())
    typed = f"{files} --acceptance replay.json --k 1-3"
    (predicted,) = json.loads(call(f"{typed} --json").stdout)["predictions"]
    shown = call(typed).stdout
    for row in predicted["rows"]:
        assert row["speedup"]["n"] == n
        assert (row["speedup"]["low"] is None) == (row["speedup"]["high"] is None) == (n == 1)
    says = shown.replace("no interval", "")
    assert ("nterval" in says) == (n > 1)
    assert f"n = {n}" in shown or n == 1
    assert ("no interval" in shown) == (n == 1)


def test_an_assumed_acceptance_has_no_interval(files):
    several = "--draft-profile draft.yaml --k 1-3"
    for command in (f"{files} --k 1-3", f"{files} {several}"):
        shown = call(f"{command} {ASSUMED} --acceptance 0.7").stdout
        assert "n = 1" not in shown
        assert "95%" not in shown
        assert shown.count("no interval") == 1


def test_no_draft_is_a_row_and_is_marked_where_it_is_fastest(files, tmp_path):
    for alpha, marked in (("0.9", False), ("0.01", True)):
        shown = call(f"{files} {ASSUMED} --acceptance {alpha} --k 3-4").stdout
        assert len(re.findall(r"^\* no draft +1\.00", shown, re.M)) == marked
        assert len(re.findall(r"^(\* )?no draft +1\.00", shown, re.M)) == 1
        assert bool(re.search(r"^\* [34] ", shown, re.M)) != marked
