"""K by batch size: vLLM's num_speculative_tokens_per_batch_size, a list of [first size, last size, K].

In vLLM 0.32 (pull request 32374, v1/spec_decode/dynamic/utils.py), the ranges begin at batch size 1 and do not overlap.
Batch sizes above the last range use the last K. K does not depend on the context (issue 48627). Even at K = 0 the draft
reads every token, see steps.py. Torch is not imported.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel
from draftlab.latency.steps import Server, steps, total_ms
from draftlab.latency.workload import Workload
from draftlab.reading import FileModel, read_model

Ranges = list[tuple[int, int, int]]
REMEDY = "; write the file with draftlab predict --for vllm --batch 1,4,16 --json > FILE"


class Schedule(FileModel):
    """K by batch size.

    pays_from, pays_up_to: First and last batch size of the first unbroken range in which decoding with the draft is
    faster than the target alone. If there is no such size, pays_up_to is 0. With a mixture of experts, pays_from may be
    above 1.
    """

    ranges: list[tuple[PositiveInt, PositiveInt, NonNegativeInt]] = Field(min_length=1)
    pays_from: PositiveInt = 1
    pays_up_to: NonNegativeInt

    @classmethod
    def of(cls, ks: Sequence[int], pays: Sequence[int]) -> "Schedule":
        """Return a schedule. ks: K at the batch sizes 1, 2, ... pays: Batch sizes at which the draft is faster.

        If `pays` has gaps, pays_from and pays_up_to are the ends of its first part without a gap.
        """
        first = pays[0] if pays else 1
        last = next((batch for batch in pays if batch + 1 not in pays), 0)
        return cls(ranges=ranges(ks), pays_from=first, pays_up_to=last)

    @model_validator(mode="after")
    def _has_each_batch_size_once(self) -> "Schedule":
        due = 1
        for first, last, _ in self.ranges:
            if not due == first <= last:
                raise ValueError(
                    f"the range {first} to {last} must begin at {due}, and must not end before it begins"
                )
            due = last + 1
        if self.pays_up_to >= due:
            raise ValueError(f"pays_up_to is {self.pays_up_to}, beyond the last range")
        return self

    @property
    def largest_k(self) -> int:
        return max(k for *_, k in self.ranges)

    def describe(self) -> str:
        """Return text that says up to which batch size the draft is faster than the target alone."""
        most = self.ranges[-1][1]
        slower = [f"below {self.pays_from}"] if self.pays_from > 1 else []
        slower += [f"above {self.pays_up_to}"] if self.pays_up_to < most else []
        if not slower:
            return f"1 to {most} streams: the draft is faster than the target alone at each of these numbers"
        return (
            f"1 to {most} streams; {' and '.join(slower)} streams, serve without a draft, because in vLLM a draft "
            "costs a pass per step even at K = 0"
        )

    def verdict(self) -> str:
        """Return text with vLLM's setting of K by batch size, and the batch size up to which a draft pays."""
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
        works: Workloads of the same texts, with another prompt length in each. The times of all workloads are added up.
        ks: Values of K to choose from, in addition to 0.

    Raises:
        UserError: A batch size is outside the profiles.
    """
    chosen, pays = list[int](), list[int]()
    # the same for all prompt lengths
    by_k = {k: steps(works[0], k, server) for k in (0, *ks)}
    for batch in range(1, most + 1):
        total, plain = dict.fromkeys(by_k, 0.0), 0.0
        for work in works:
            alone, drafted = total_ms(draft, target, work, by_k, batch, server)
            plain += alone
            for k, ms in drafted.items():
                total[k] += ms
        chosen.append(min(total, key=lambda k: total[k]))
        if total[chosen[-1]] < plain:
            pays.append(batch)
    return Schedule.of(chosen, pays)


class PredictedSchedule(BaseModel):
    """The schedule and the draft of a prediction in the output of `draftlab predict --json`."""

    draft_sha256: str | None
    schedule: Schedule | None


class Predictions(BaseModel):
    predictions: list[PredictedSchedule]


def read_schedule(file: Path, draft: str, sha256: str | None) -> Schedule:
    """Return the schedule for a draft from a file with the output of `draftlab predict --for vllm --json`.

    Args:
        draft: Name of the draft, for messages.
        sha256: Hash of the draft.

    Raises:
        UserError: The file has no schedule for this draft, or predicts that the draft is slower than the target alone.
    """
    predictions = read_model(Predictions, file, hint=REMEDY).predictions
    found = next((each.schedule for each in predictions if each.draft_sha256 == sha256), None)
    if found is None:
        raise UserError(f"{file} has no table of K by batch size for {draft}{REMEDY}")
    if found.pays_up_to == 0:
        raise UserError(
            f"{file} predicts that {draft} is slower than the target alone; serve the target without a draft"
        )
    return found


def schedule_of(ks: Mapping[int, int]) -> Schedule:
    """Return a schedule from the best K at some numbers of streams. Each K is used until the next of these numbers.

    ks: Best K by number of streams; 0 for no draft.
    """
    streams = sorted(ks)
    k, each = ks[streams[0]], []
    for batch in range(1, streams[-1] + 1):
        k = ks.get(batch, k)
        each.append(k)
    return Schedule.of(each, [batch for batch, k in enumerate(each, 1) if k])


def ranges(ks: Iterable[int]) -> Ranges:
    """Merge batch sizes with equal K into ranges. ks: K at the batch sizes 1, 2, ..."""
    merged: Ranges = []
    for k, group in itertools.groupby(ks):
        first = merged[-1][1] + 1 if merged else 1
        merged.append((first, first + len(list(group)) - 1, k))
    return merged
