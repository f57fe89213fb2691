"""Scores made of chosen numbers, and reports made of them."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from draftlab.model.shape import Shape
from draftlab.results.decoding import Expected, Generation
from draftlab.results.ranking import grouped
from draftlab.results.report import ranking_table
from draftlab.results.score import (
    Conditions,
    Environment,
    FollowingLatency,
    Latency,
    Model,
    Prediction,
    PromptRecord,
    Score,
    TaskResult,
)
from draftlab.results.tables import Table, TerminalTable
from helpers.latencies import latency

PROMPTS = 12
ACC = TaskResult(task="py_choice", metric="acc", value=0.612, stderr=0.014, n=200, higher_is_better=True)
CONDITIONS = Conditions(
    device="cpu",
    dtype="float32",
    target_weights="float32",
    draft_weights="float32",
    mode="eager",
    threads=1,
    temperature=0,
    data="standard library",
    prompts=PROMPTS,
    prompt_tokens=32,
    max_tokens=16,
    repeats=1,
    context=64,
    seed=0,
    selection="theirs",
)
IDLE = Environment(system="s", processor="p", cores=2, busy_cores=0.0, governor=None, driver=None)
BUSY = IDLE.model_copy(update={"busy_cores": 1.5})


def model(name: str, layers: int, ms: float, tasks: list[TaskResult]) -> Model:
    shape = Shape(layers=layers, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=512)
    latency = [Latency(width=1, median_ms=ms, low_ms=0.9 * ms, high_ms=1.2 * ms, n=30)]
    later = [FollowingLatency(**latency[0].model_dump(), after=number) for number in (1, 2)]
    return Model(
        name=name,
        sha256=f"{layers:064x}",
        shape=shape,
        latency=latency,
        following=later,
        tasks=tasks,
    )


def plain(prompt: int, seconds: float) -> Generation:
    """16 tokens of equal time: the prefill's, and 15 in steps that draft nothing."""
    nothing = speculative(prompt, [0] * 15, 0, seconds)
    return change(nothing, draft_seconds=0, verify_seconds=seconds, host_seconds=0)


def speculative(prompt: int, accepted: list[int], k: int, seconds: float, cut: int = 0) -> Generation:
    """Time is one third drafting, one half verifying, one sixth host; the first cut steps emit one token less."""
    emitted = [a + 1 - (i < cut) for i, a in enumerate(accepted)]
    return Generation(
        prompt=prompt,
        tokens=1 + sum(emitted),
        drafted=[k] * len(accepted),
        accepted=accepted,
        emitted=emitted,
        prefill_seconds=seconds / 15,
        draft_seconds=seconds / 3,
        verify_seconds=seconds / 2,
        host_seconds=seconds / 6,
    )


def change(base: Any, **fields: object) -> Any:
    return base.model_copy(update=fields)


def without_host(base: Score) -> Score:
    """Return the score with the time of the host counted as time of the target's passes."""

    def moved(runs: list[Generation]) -> list[Generation]:
        return [change(g, host_seconds=0, verify_seconds=g.verify_seconds + g.host_seconds) for g in runs]

    speculative = {k: moved(base.generations(k)) for k in base.speculative}
    return change(base, plain=moved(base.plain), speculative=speculative)


UNEVEN = [plain(i, 0.3 + 0.1 * i) for i in range(PROMPTS)]


def score(
    name: str = "wide",
    *,
    speed: float = 1.0,
    layers: int = 2,
    tasks: tuple[TaskResult, ...] = (ACC,),
) -> Score:
    """Twice as fast at K = 4 (3 tokens per pass, half accepted) and 1.2 times at K = 1, both multiplied by speed."""
    runs = {
        1: [speculative(i, [1] * 7 + [0], 1, 0.5 / speed) for i in range(PROMPTS)],
        4: [speculative(i, [4, 2, 0, 3, 1], 4, 0.3 / speed) for i in range(PROMPTS)],
    }
    return Score(
        name=name,
        target=model("target", 12, 20.0, []),
        draft=model(f"runs/{name}", layers, 2.5, list(tasks)),
        conditions=CONDITIONS,
        plain=[plain(i, 0.6) for i in range(PROMPTS)],
        speculative=runs,
        equal_texts=1.0,
        prompts=[PromptRecord(tokens=32, conversation=i) for i in range(PROMPTS)],
        distinct_4grams=0.8,
        command=f"draftlab score {name}",
        versions={},
        created="2026-01-02T03:04:05Z",
    )


def conditioned(base: Score, **fields: object) -> Score:
    return change(base, conditions=base.conditions.model_copy(update=fields))


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where a tag closes another."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def rendered(table: Table | TerminalTable, width: int) -> str:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(table.terminal() if isinstance(table, Table) else table)
    return capture.get()


def board(*scores: Score) -> Table:
    (group,) = grouped(list(scores))
    return ranking_table(group)


def later(ms: float, after: int = 1) -> FollowingLatency:
    return FollowingLatency(**latency(1, ms).model_dump(), after=after)


def at(name: str, seconds: list[float]) -> Score:
    """5 steps of 3 tokens on average for each prompt, in so many seconds; plain decoding differs by prompt."""
    runs = [speculative(i, [4, 2, 0, 3, 1], 4, s) for i, s in enumerate(seconds)]
    return change(score(name), plain=UNEVEN, speculative={4: runs})


def kept(folder: Path, *scores: Score) -> list[Path]:
    for one in scores:
        (folder / one.name).mkdir(parents=True)
        (folder / one.name / "score.json").write_text(one.model_dump_json())
    return [folder / one.name for one in scores]


def generation(prompt=0, drafted=[], accepted=[], emitted=None, seconds=1.0) -> Generation:  # noqa: B006
    emitted = [a + 1 for a in accepted] if emitted is None else emitted
    return Generation(
        prompt=prompt,
        tokens=1 + sum(emitted),
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        prefill_seconds=0.5,
        draft_seconds=seconds / 4,
        verify_seconds=seconds / 2,
        host_seconds=seconds / 4,
    )


def expected(seconds: list[float]) -> Expected:
    n = len(seconds)
    return Expected(
        seconds=seconds,
        draft_seconds=[0.1] * n,
        verify_seconds=[0.1] * n,
        host_seconds=[0.1] * n,
        passes=[1.0] * n,
        drafted=[1.0] * n,
        reached=[[1.0, 0.0]] * n,
        examined=[[1.0]] * n,
        truncated=[0.0] * n,
    )


def prediction(**by_k: list[float]) -> Prediction:
    each = {int(name[1:]): expected(seconds) for name, seconds in by_k.items()}
    n = len(next(iter(by_k.values())))
    best = min(each, key=lambda k: sum(each[k].seconds))
    return Prediction(prompts=[*range(n)], tokens=[9] * n, plain=[1.0] * n, by_k=each, best_k=best)
