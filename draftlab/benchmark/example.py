"""One prompt decoded once more, untimed, to show which drafted tokens were kept and which were lost."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from draftlab.engine.generate import Draft, Drafter, Step, TargetCacheReader, speculative_decode
from draftlab.engine.rejection_rules import Rule
from draftlab.model.decoder import Decoder
from draftlab.results.decoding import Example, ExampleStep
from draftlab.sampling import SamplingParams


class _Recorder:
    """A drafter whose last proposal of the first row can be read."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.last: Draft | None = None

    def reset(self, rows: int, capacity: int) -> None:
        self.drafter.reset(rows, capacity)

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: Tensor) -> Draft:
        self.last = self.drafter.propose(texts, count, sampling, uniform)
        return self.last


class _CacheReadingRecorder(_Recorder):
    def attach(self, cache: object) -> None:
        assert isinstance(self.drafter, TargetCacheReader)
        self.drafter.attach(cache)


def record_example(
    target: Decoder,
    drafter: Drafter,
    as_text: Callable[[list[int]], str],
    prompt: list[int],
    *,
    number: int,
    k: int,
    sampling: SamplingParams,
    rule: Rule | None,
    draft_temperature: float | None = None,
) -> Example:
    """Decode a prompt and return its steps as text.

    as_text: of token ids. number: of the prompt, which decides its random draws.
    """
    recorder = (_CacheReadingRecorder if isinstance(drafter, TargetCacheReader) else _Recorder)(drafter)
    text, steps = list(prompt), []
    decoded = speculative_decode(
        target, recorder, [prompt], k, sampling, numbers=[number], rule=rule, draft_temperature=draft_temperature
    )
    for step, lost in _with_lost(recorder, decoded):
        emitted = _pieces(as_text, text, step.tokens)
        accepted, own = emitted[: step.accepted], emitted[step.accepted :]
        after = [*text, *step.tokens[: step.accepted]]
        steps.append(ExampleStep(kept=accepted, lost=_pieces(as_text, after, lost), own="".join(own)))
        text += step.tokens
    return Example(prompt=number, k=k, text=as_text(prompt), first=steps[0].own, steps=steps[1:])


def _with_lost(recorder: _Recorder, steps: Iterator[Step]) -> Iterator[tuple[Step, list[int]]]:
    """Yield each step with the drafted tokens that were not kept."""
    for step in steps:
        draft, recorder.last = recorder.last, None
        yield step, _lost(draft, step) if draft is not None else []


def _lost(draft: Draft, step: Step) -> list[int]:
    ids = draft.ids[0, : step.drafted].tolist()
    node, path = 0, set()
    parents = draft.parents_of(0)
    for token in step.tokens[: step.accepted]:
        node = 1 + next(i for i, id in enumerate(ids) if parents[i] == node and id == token)
        path.add(node - 1)
    return [id for i, id in enumerate(ids) if i not in path]


def _pieces(as_text: Callable[[list[int]], str], before: list[int], ids: list[int]) -> list[str]:
    """Return what each token adds to a text; a character in several tokens comes with the last of them."""
    pieces, shown = [], as_text(before).rstrip("\ufffd")
    for end in range(1, len(ids) + 1):
        whole = as_text([*before, *ids[:end]]).rstrip("\ufffd")
        pieces.append(whole[len(shown) :])
        shown = whole
    return pieces
