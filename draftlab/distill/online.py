"""Online speculative decoding: a draft that follows the traffic it serves (Liu et al. 2023, 2310.07177).

A folder holds versions of a draft and a ledger of what was tried. The newest traffic judges and is not trained on; what
came before it trains, with a share of the base cache against forgetting. A candidate is promoted only when it gains on
the newest traffic beyond the noise and loses nothing on the base cache's held-out text; the version before stays.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from draftlab.data import HeldOut
from draftlab.distill import evaluate
from draftlab.distill.evaluate import Length
from draftlab.distill.on_policy import Mixed
from draftlab.distill.teachers import CachedTeacher
from draftlab.distill.trainer import TrainingSetup
from draftlab.errors import UserError
from draftlab.files import validation_text
from draftlab.model import checkpoint
from draftlab.target_outputs.cache import HELDOUT, check_tokenizer, open_cache, read_manifest, read_shard

LEDGER, LIVE, VERSIONS = "ledger.json", "live", "versions"
FEWEST, MOST = 16, 512  # sequences of the newest traffic that judge
ANCHOR_LOSS = 0.01  # share of tokens per pass that a candidate may lose on the base cache's text
JUDGED_K = 4


class Round(BaseModel):
    """One attempt: what it was trained on, what judged it, and how. Ratios are of tokens per target pass at K = 4."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int  # the candidate's number
    trained_on: tuple[str, ...]
    judged_by: str
    before: float
    after: float
    gain_low: float  # lower end of after / before, 95 %, over sequences
    anchor: float  # after / before on the base cache's held-out text
    promoted: bool
    created: str


class Ledger(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    live: int = 0
    before: int | None = None  # the version to go back to
    rounds: tuple[Round, ...] = ()

    def judged(self) -> set[str]:
        return {r.judged_by for r in self.rounds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """traffic: a folder of caches, in the order of their names. window: how many of them train."""

    folder: Path
    traffic: Path
    base: Path
    replay: float
    window: int
    temperature: float

    def newest(self) -> tuple[list[Path], Path]:
        """What trains, and what judges.

        Raises:
            UserError: fewer than two caches, or too little in the newest.
        """
        found = (
            sorted(p for p in self.traffic.iterdir() if (p / "manifest.json").is_file())
            if self.traffic.is_dir()
            else []
        )
        if len(found) < 2:
            raise UserError(f"{self.traffic} holds {len(found)} caches of traffic; one trains and a newer one judges")
        *older, judge = found
        if (held := read_manifest(judge).sequences) < FEWEST:
            raise UserError(f"{judge} holds {held} sequences; to judge a draft takes {FEWEST}")
        return older[-self.window :], judge


def ledger(folder: Path) -> Ledger:
    """Raises UserError: a ledger that cannot be read."""
    try:
        return Ledger.model_validate_json((folder / LEDGER).read_text())
    except OSError:
        raise UserError(f"{folder} holds no {LEDGER}: draftlab distill --online makes one") from None
    except ValidationError as error:
        raise UserError(f"{folder / LEDGER}: {validation_text(error)}") from None


def start(folder: Path, draft: Path) -> None:
    """Version 0 is a copy of draft; a folder that has begun is left as it is."""
    if (folder / LEDGER).exists():
        return
    with checkpoint.new_directory(version(folder, 0), force=True) as work:
        shutil.copytree(draft, work, dirs_exist_ok=True)
    _record(folder, Ledger())


def version(folder: Path, number: int) -> Path:
    return folder / VERSIONS / f"{number:04d}"


def setup(how: Online, draft: Path, *, rows: int, steps: int) -> TrainingSetup:
    """The window's traffic, by its tokens, and the base cache."""
    older, _ = how.newest()
    for cache in (how.base, *older):
        if read_manifest(cache).text == "data":
            raise UserError(f"{cache} is of text that the target did not write; build it with --text target")
    base, held = open_cache(how.base, draft, rows=rows, temperature=how.temperature)
    opened = {path.name: open_cache(path, draft, rows=rows, temperature=how.temperature) for path in older}
    if other := next((n for n, (b, _) in opened.items() if b.manifest.vocab != base.manifest.vocab), None):
        raise UserError(f"{other} lists another vocabulary than {how.base}")
    tokens = {name: batches.manifest.tokens for name, (batches, _) in opened.items()}
    shares = {name: (1 - how.replay) * n / sum(tokens.values()) for name, n in tokens.items()}
    sources = {name: batches for name, (batches, _) in opened.items()} | {"base cache": base}
    shares |= {"base cache": how.replay} if how.replay else {}
    text = [batch for _, text in opened.values() for batch in text.batches] + held.batches
    return TrainingSetup(
        teacher=CachedTeacher(base.manifest.vocab),
        batches=Mixed.of(sources, shares, steps),
        heldout=HeldOut(text, held.bytes_per_token),
    )


def judge(how: Online, candidate: Path, device: torch.device) -> Round:
    """Both drafts by replay of the newest traffic, which neither has seen, and of the base cache's held-out text."""
    older, newest = how.newest()
    held = ledger(how.folder)
    live = version(how.folder, held.live)
    found = _compared(newest, live, candidate, how.temperature, device)
    anchor = _compared(how.base / HELDOUT, live, candidate, how.temperature, device)
    kept = anchor.after / anchor.before
    return Round(
        version=_next(held),
        trained_on=tuple(path.name for path in older),
        judged_by=newest.name,
        before=found.before,
        after=found.after,
        gain_low=found.gain_low,
        anchor=kept,
        promoted=found.gain_low > 1 and kept >= 1 - ANCHOR_LOSS,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def candidate(how: Online) -> Path:
    """Where the round's draft is written, by its number and by what trained it."""
    older, newest = how.newest()
    return how.folder / VERSIONS / f"candidate-{_next(ledger(how.folder)):04d}-{older[-1].name}-{newest.name}"


def settle(folder: Path, made: Path, found: Round) -> None:
    """Promote or drop the candidate. live is moved last, so that it always names a whole version."""
    held = ledger(folder)
    if not found.promoted:
        shutil.rmtree(made)
        _record(folder, held.model_copy(update={"rounds": (*held.rounds, found)}))
        return
    shutil.rmtree(version(folder, found.version), ignore_errors=True)  # of a promotion that was killed
    made.rename(version(folder, found.version))
    update = {"live": found.version, "before": held.live, "rounds": (*held.rounds, found)}
    _record(folder, held.model_copy(update=update))
    for old in (folder / VERSIONS).iterdir():
        if old not in (version(folder, found.version), version(folder, held.live)):
            shutil.rmtree(old)


def rollback(folder: Path) -> int:
    """Make the version before the live one again; its number.

    Raises:
        UserError: there is none.
    """
    held = ledger(folder)
    if held.before is None:
        raise UserError(f"{folder} has no version before {held.live} to go back to")
    _record(folder, held.model_copy(update={"live": held.before, "before": None}))
    return held.before


def _next(held: Ledger) -> int:
    return 1 + max([held.live, *(r.version for r in held.rounds)])


def _record(folder: Path, held: Ledger) -> None:
    _swap(folder / LEDGER, lambda path: path.write_text(held.model_dump_json(indent=1)))
    _swap(folder / LIVE, lambda path: path.symlink_to(version(folder, held.live).relative_to(folder)))


def _swap(path: Path, make: Callable[[Path], object]) -> None:
    """Replace path by what make puts under another name, in one step."""
    writing = path.with_name(f".{path.name}.writing")
    writing.unlink(missing_ok=True)
    make(writing)
    os.replace(writing, path)


def _compared(cache: Path, live: Path, candidate: Path, temperature: float, device: torch.device) -> Length:
    manifest = read_manifest(cache)
    for draft in (live, candidate):
        check_tokenizer(manifest, draft)
    texts, log_p = _written(cache, temperature)
    chances = []
    for draft in (live, candidate):
        model = checkpoint.load_model(draft, torch.float32, device).eval()
        chances.append(evaluate.replayed(model, texts, log_p, temperature))
    return next(found for found in evaluate.lengths(*chances) if found.k == JUDGED_K)


def _written(cache: Path, temperature: float) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]:
    """Texts as (prompt, written) ids, and the target's log-probability of what it wrote, at temperature."""
    manifest = read_manifest(cache)
    texts, log_p = [], []
    for number in range(len(manifest.shards)):
        shard = read_shard(cache, manifest, number)
        lse = shard["lse"][..., manifest.temperatures.index(temperature)]  # [R, T]
        for ids, mask, came, rest in zip(shard["input_ids"], shard["mask"], shard["tok_logp"], lse, strict=True):
            where = mask.nonzero()[0]
            if len(where) and len(texts) < MOST:
                first, last = int(where[0]), int(where[-1]) + 1
                texts.append((ids[: first + 1].astype(np.int64), ids[first + 1 : last + 1].astype(np.int64)))
                log_p.append(came[first:last].astype(np.float64) / temperature - rest[first:last])
    return texts, log_p
