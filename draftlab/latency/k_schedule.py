"""K by batch size: vLLM's num_speculative_tokens_per_batch_size, a list of [first size, last size, K]. No torch.

The setting of vLLM 0.32 (pull request 32374, v1/spec_decode/dynamic/utils.py) starts at batch size 1 with ranges that
do not overlap; larger batches use the last range's K. K does not depend on the context (issue 48627). At K = 0 the
draft still reads every token (steps.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel
from draftlab.latency.steps import Server, steps, total_ms
from draftlab.latency.workload import Workload
from draftlab.reading import FileModel, read_model

Ranges = list[tuple[int, int, int]]
REMEDY = "; make one with draftlab predict --for vllm --batch 1,4,16 --json"


class Schedule(FileModel):
    """K by batch size. pays_up_to: Largest batch size up to which a draft is faster than none; 0 if it never is."""

    ranges: list[tuple[PositiveInt, PositiveInt, NonNegativeInt]] = Field(min_length=1)
    pays_up_to: NonNegativeInt

    @model_validator(mode="after")
    def _has_each_batch_size_once(self) -> "Schedule":
        due = 1
        for first, last, _ in self.ranges:
            if not due == first <= last:
                raise ValueError(f"the range {first} to {last} must begin at {due}, and end later")
            due = last + 1
        if self.pays_up_to >= due:
            raise ValueError(f"pays_up_to is {self.pays_up_to}, beyond the last range")
        return self

    @property
    def largest_k(self) -> int:
        return max(k for *_, k in self.ranges)

    def describe(self) -> str:
        """Return text on the batch sizes at which a draft is faster than none."""
        most = self.ranges[-1][1]
        if self.pays_up_to == most:
            return f"1 to {most} streams, at each of which the draft is faster than none"
        return (
            f"1 to {most} streams; above {self.pays_up_to} streams serve without a draft, because in vLLM a draft "
            "costs a pass per step even at K = 0"
        )

    def verdict(self) -> str:
        """Return text with vLLM's setting, and with the batch size above which to serve without a draft."""
        if self.pays_up_to == 0:
            return f"No draft: with 1 to {self.ranges[-1][1]} streams, no draft is faster than the target alone"
        return f"num_speculative_tokens_per_batch_size {[list(r) for r in self.ranges]} for {self.describe()}"


def schedule(
    draft: CostModel,
    target: CostModel,
    works: Sequence[Workload],
    ks: Sequence[int],
    most: int,
    server: Server,
) -> Schedule:
    """Return the fastest K at every batch size from 1 to `most`.

    Args:
        works: The same texts after prompts of different lengths, whose times are added.

    Raises:
        UserError: a batch size is outside the profiles.
    """
    chosen: list[int] = []
    pays_up_to = 0
    by_k = {k: steps(works[0], k) for k in (0, *ks)}  # the same for all prompt lengths
    for batch in range(1, most + 1):
        total, plain = dict.fromkeys(by_k, 0.0), 0.0
        for work in works:
            alone, drafted = total_ms(draft, target, work, by_k, batch, server)
            plain += alone
            for k, ms in drafted.items():
                total[k] += ms
        chosen.append(min(total, key=lambda k: total[k]))
        if pays_up_to == batch - 1 and total[chosen[-1]] < plain:
            pays_up_to = batch
    return Schedule(ranges=ranges(chosen), pays_up_to=pays_up_to)


class PredictedSchedule(BaseModel):
    """A prediction as `predict --json` writes it, of which only the schedule and the draft are read."""

    draft_sha256: str | None
    schedule: Schedule | None


class Predictions(BaseModel):
    predictions: list[PredictedSchedule]


def read_schedule(file: Path, draft: str, sha256: str | None) -> Schedule:
    """Return the schedule that `predict --for vllm --json` printed for a draft. draft: Its name, for messages.

    Raises:
        UserError: the file predicts other drafts, has no schedule, or says that no draft pays.
    """
    predictions = read_model(Predictions, file, hint=REMEDY).predictions
    prediction = next((each for each in predictions if each.draft_sha256 == sha256), None)
    if prediction is None:
        raise UserError(f"{file} predicts other drafts than {draft}{REMEDY}")
    if prediction.schedule is None:
        raise UserError(f"{file} has no table of K by batch size{REMEDY}")
    if prediction.schedule.pays_up_to == 0:
        raise UserError(
            f"{file} predicts that {draft} is slower than no draft at every batch size: serve the target"
        )
    return prediction.schedule


def schedule_of(ks: Mapping[int, int]) -> Schedule:
    """Return the schedule that uses each best K up to the next number of streams.

    ks: Best K by number of streams; 0 for no draft.
    """
    streams = sorted(ks)
    k, each = ks[streams[0]], []
    for batch in range(1, streams[-1] + 1):
        k = ks.get(batch, k)
        each.append(k)
    return Schedule(ranges=ranges(each), pays_up_to=each.index(0) if 0 in each else len(each))


def ranges(ks: Iterable[int]) -> Ranges:
    """Return ranges of batch sizes with equal K. ks: K of batch sizes 1, 2, ..."""
    merged: Ranges = []
    for batch, k in enumerate(ks, 1):
        if merged and merged[-1][2] == k:
            merged[-1] = (merged[-1][0], batch, k)
        else:
            merged.append((batch, batch, k))
    return merged
