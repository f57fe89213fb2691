"""Online speculative decoding: a draft that follows the traffic it serves (Liu et al. 2023, 2310.07177).

A folder holds versions of a draft and a ledger of rounds. The newest traffic judges and is not trained on; what came
before it trains, with a share of base outputs against forgetting. A candidate is promoted only if it gains on the
newest traffic beyond the noise and loses nothing on the base outputs' held-out text. The version before is kept.
"""

import shutil
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from draftlab.atomic import new_directory, remove_state, write_atomic
from draftlab.config.distill import OnlineConfig
from draftlab.config.shared import newest_draft
from draftlab.data import HeldOut
from draftlab.distill import distributed, evaluate, trackers
from draftlab.distill.checkpointer import select_device
from draftlab.distill.distill import load_student
from draftlab.distill.evaluate import LengthComparison, TargetText
from draftlab.distill.losses import parse_loss
from draftlab.distill.on_policy import MixedBatches
from draftlab.distill.run import TrainedModel, claimed_state, fit_and_write
from draftlab.distill.teachers import StoredTeacher
from draftlab.distill.trainer import TrainingSetup
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.output import Output
from draftlab.reading import FileModel, read_model
from draftlab.target_outputs.batches import open_stored
from draftlab.target_outputs.store import HELDOUT, check_tokenizer, read_manifest, read_store

LEDGER, LIVE, VERSIONS = "ledger.json", "live", "versions"
FEWEST, MOST = 16, 512  # sequences of the newest traffic that judge
ANCHOR_LOSS = 0.01  # share of tokens per pass that a candidate may lose on the base outputs' text
JUDGED_K = 4


class Round(FileModel):
    """One attempt: what trained it, what judged it, and the verdict. Ratios are of tokens per target pass at K = 4."""

    version: int  # the candidate's number
    trained_on: tuple[str, ...]
    judged_by: str
    before: float
    after: float
    gain_low: float  # lower end of after / before, 95 %, over sequences
    anchor: float  # after / before on the base outputs' held-out text
    promoted: bool
    created: str


class Ledger(FileModel):
    live: int = 0
    before: int | None = None  # the version to roll back to
    rounds: tuple[Round, ...] = ()

    @property
    def next_version(self) -> int:
        return 1 + max([self.live, *(r.version for r in self.rounds)])


def update(config: OnlineConfig, output: Output) -> Round | None:
    """Run one round: train a candidate, judge it, promote or drop it. None if the newest traffic has judged already.

    Raises:
        UserError: too little traffic, outputs that the target did not write, or training fails.
    """
    distributed.check(optimizer=config.optimizer)
    trackers.check(config.report_to)
    older, newest = traffic(config)
    folder = output.out
    if not (folder / LEDGER).exists():
        _start(folder, hub.locate(config.draft or newest_draft()))
    elif newest.name in {r.judged_by for r in read_ledger(folder).rounds}:
        return None
    ledger = read_ledger(folder)
    live = version_directory(folder, ledger.live)
    name = f"candidate-{ledger.next_version:04d}-{older[-1].name}-{newest.name}"
    candidate = folder / VERSIONS / name  # of a round that was killed it is not trained anew
    if not candidate.exists():
        _train(config, older, live, replace(output, out=candidate, force=False))
    verdict = judge(config, ledger, live, candidate)
    _settle(folder, ledger, candidate, verdict)
    return verdict


def traffic(config: OnlineConfig) -> tuple[list[Path], Path]:
    """Return the stored outputs that train and those that judge.

    Raises:
        UserError: fewer than two, or too little in the newest.
    """
    folder = config.traffic
    stored = sorted(p for p in folder.glob("*") if (p / "manifest.json").is_file())
    if len(stored) < 2:
        raise UserError(f"--traffic {folder} has {len(stored)} stored outputs; one trains and a newer one judges")
    *older, newest = stored
    if (count := read_manifest(newest).sequences) < FEWEST:
        raise UserError(f"{newest} has {count} sequences; judging a draft takes {FEWEST}")
    return older[-config.window :], newest


def read_ledger(folder: Path) -> Ledger:
    """Raises UserError: the ledger cannot be read."""
    if not (folder / LEDGER).exists():
        raise UserError(f"{folder} has no {LEDGER}; draftlab online update writes one")
    return read_model(Ledger, folder / LEDGER)


def version_directory(folder: Path, number: int) -> Path:
    return folder / VERSIONS / f"{number:04d}"


def judge(config: OnlineConfig, ledger: Ledger, live: Path, candidate: Path) -> Round:
    """Replay the newest traffic, unseen by both drafts, and the base outputs' held-out text with both drafts."""
    older, newest = traffic(config)
    device = select_device(config.device)
    compared = _compare(newest, live, candidate, config.temperature, device)
    base = _compare(config.outputs / HELDOUT, live, candidate, config.temperature, device)
    anchor = base.after / base.before
    return Round(
        version=ledger.next_version,
        trained_on=tuple(path.name for path in older),
        judged_by=newest.name,
        before=compared.before,
        after=compared.after,
        gain_low=compared.gain_low,
        anchor=anchor,
        promoted=compared.gain_low > 1 and anchor >= 1 - ANCHOR_LOSS,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def rollback(folder: Path) -> int:
    """Make the version before the live one live again, and return its number.

    Raises:
        UserError: there is none.
    """
    ledger = read_ledger(folder)
    if ledger.before is None:
        raise UserError(f"{folder} has no version before {ledger.live} to roll back to")
    _write(folder, ledger.model_copy(update={"live": ledger.before, "before": None}))
    return ledger.before


def _start(folder: Path, draft: Path) -> None:
    with new_directory(version_directory(folder, 0), force=True) as work:
        shutil.copytree(draft, work, dirs_exist_ok=True)
    _write(folder, Ledger())


def _train(config: OnlineConfig, older: list[Path], live: Path, output: Output) -> None:
    setup, inputs = traffic_setup(config, older, live), [live, config.outputs]
    model = TrainedModel(config=checkpoint.read_config(live), like=live, lora_rank=config.lora_rank)
    select_device(config.device)
    with claimed_state(output, inputs):
        fit_and_write(load_student(live, config), setup, config, model, output, inputs)


def traffic_setup(config: OnlineConfig, older: list[Path], draft: Path) -> TrainingSetup:
    """Return a setup from traffic, weighted by tokens, and the base outputs.

    Raises:
        UserError: text that the target did not write, or another vocabulary.
    """
    for stored in (config.outputs, *older):
        if read_manifest(stored).text == "data":
            raise UserError(f"{stored} is of text that the target did not write; store outputs with --text target")
    sizes = {"batch_size": config.batch_size, "temperature": config.temperature, "seed": config.seed}
    base, base_heldout = open_stored(config.outputs, draft, **sizes)
    opened = {path.name: open_stored(path, draft, **sizes) for path in older}
    if other := next((n for n, (b, _) in opened.items() if b.manifest.vocab != base.manifest.vocab), None):
        raise UserError(f"{other} lists another vocabulary than {config.outputs}")
    tokens = {name: batches.manifest.tokens for name, (batches, _) in opened.items()}
    shares = {name: (1 - config.replay) * n / sum(tokens.values()) for name, n in tokens.items()}
    sources = {name: batches for name, (batches, _) in opened.items()} | {"base outputs": base}
    shares |= {"base outputs": config.replay} if config.replay else {}
    heldout = [batch for _, text in opened.values() for batch in text.batches] + base_heldout.batches
    return TrainingSetup(
        teacher=StoredTeacher(base.manifest.vocab),
        batches=MixedBatches.of(sources, shares, config.steps),
        heldout=HeldOut(heldout, base_heldout.bytes_per_token),
        loss=parse_loss(config.loss),
        temperature=config.temperature,
    )


def _settle(folder: Path, ledger: Ledger, candidate: Path, verdict: Round) -> None:
    """Promote or drop the candidate. live is moved last, so that it always names a whole version."""
    rounds = (*ledger.rounds, verdict)
    if not verdict.promoted:
        remove_state(candidate)  # at once: half of one would be judged by the next run
        _write(folder, ledger.model_copy(update={"rounds": rounds}))
        return
    promoted, live = version_directory(folder, verdict.version), version_directory(folder, ledger.live)
    shutil.rmtree(promoted, ignore_errors=True)  # of a promotion that was killed
    candidate.rename(promoted)
    _write(folder, Ledger(live=verdict.version, before=ledger.live, rounds=rounds))
    for old in (folder / VERSIONS).iterdir():
        if old not in (promoted, live):
            shutil.rmtree(old)


def _write(folder: Path, ledger: Ledger) -> None:
    write_atomic(folder / LEDGER, ledger.model_dump_json(indent=1))
    link = folder / f".{LIVE}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(version_directory(folder, ledger.live).relative_to(folder))
    link.replace(folder / LIVE)


def _compare(stored: Path, live: Path, candidate: Path, temperature: float, device: torch.device) -> LengthComparison:
    manifest = read_manifest(stored)
    for draft in (live, candidate):
        check_tokenizer(manifest, draft)
    text = _target_text(stored, temperature)
    chances = []
    for draft in (live, candidate):
        model = checkpoint.load_model(draft, torch.float32, device).eval()
        chances.append(evaluate.acceptance_probabilities(model, text))
    return next(c for c in evaluate.compare_lengths(*chances) if c.k == JUDGED_K)


def _target_text(stored: Path, temperature: float) -> TargetText:
    store = read_store(stored)
    column, texts, log_p = store.manifest.temperatures.index(temperature), [], []
    for output in [o for o in store.outputs if len(o.ids)][:MOST]:
        assert output.top is not None
        texts.append((output.prompt.astype(np.int64), output.ids.astype(np.int64)))
        log_p.append(output.top.token.astype(np.float64) / temperature - output.top.normalizers[:, column])
    return TargetText(texts, log_p, temperature)
