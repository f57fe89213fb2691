"""Answers of a server to requests that are sent one at a time, with the counters of its speculative decoding."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from draftlab.errors import UserError
from draftlab.results.decoding import Counters, ServedGeneration
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server, spec_decode_counters, undrafted

# vLLM's counter of prompt tokens from its prefix cache, and its older names
PREFIX_HITS = re.compile(r"(|.*:|(ray_)?vllm_)(gpu_)?prefix_cache_hits(_total)?")


@dataclass(slots=True)
class ServerAnswers:
    """Answers of one server, and the server's metrics before and after them.

    Args:
        tokens: Token ids of each answer in the first repeat, by the number of the prompt.
        lengths: Number of tokens of every answer, including answers to prompts that are left out.
        answer_counters: Counters of speculative decoding in each answer, if the server sends them (SGLang).
    """

    runs: list[ServedGeneration] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    answer_counters: list[Counters] = field(default_factory=list)
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)

    def ask(
        self,
        server: Server,
        prompt: list[int],
        sampling: SamplingParams,
        clock: Callable[[], float],
    ) -> tuple[list[int], float]:
        """Send a prompt to the server, and return the token ids and the seconds of the answer.

        Counters in the answer, as SGLang sends them, are added to answer_counters.
        """
        start = clock()
        ids, counters = server.generate_ids(prompt, sampling)
        seconds = clock() - start
        if counters is not None:
            self.answer_counters.append(counters)
        self.lengths.append(len(ids))
        return ids, seconds

    def without(self, refused: Sequence[int]) -> None:
        """Remove the answers to the prompts of these numbers, and number the prompts after them anew."""
        self.runs = renumbered(self.runs, refused)
        kept = [ids for prompt, ids in sorted(self.tokens.items()) if prompt not in refused]
        self.tokens = dict(enumerate(kept))

    @property
    def counters(self) -> Counters | None:
        """Return how much the server's counters of speculative decoding grew, or None if nothing was drafted."""
        if not self.answer_counters:
            return spec_decode_counters(self.before, self.after)
        by_position = zip_longest(*(c.num_accepted_tokens_per_pos for c in self.answer_counters), fillvalue=0.0)
        return Counters(
            num_drafts=sum(c.num_drafts for c in self.answer_counters),
            num_draft_tokens=sum(c.num_draft_tokens for c in self.answer_counters),
            num_accepted_tokens_per_pos=list(map(sum, by_position)),
        )

    @property
    def undrafted(self) -> str:
        """Return why there are no counters, as the predicate of a sentence about the server."""
        return undrafted(self.after)

    @property
    def cached_prompt_tokens(self) -> float:
        """Return the number of prompt tokens that the server took from its prefix cache."""
        series = [name for name in self.after if PREFIX_HITS.fullmatch(name.partition("{")[0])]
        return sum(self.after[name] - self.before.get(name, 0.0) for name in series)


def read_metrics(server: Server) -> dict[str, float]:
    """Return the counters on a server's metrics page. For SGLang return {}, because its answers contain counters."""
    return {} if server.kind == "sglang" else server.metrics()


def check_alone(server: Server, counters: Counters, lengths: Sequence[int]) -> None:
    """Check that a server's counters agree with the lengths of the answers that this client received.

    Each answer has one token from the prefill, one token per step, and the accepted tokens. A server with
    cuts_last_step drafts nothing in the step of an answer's last token, and does not count this step.

    Raises:
        UserError: The counters do not agree, so the server answered other clients as well.
    """
    tokens = sum(lengths)
    answers = len(lengths)
    most = answers + counters.num_drafts + sum(counters.num_accepted_tokens_per_pos)
    uncounted = answers * server.adapter.cuts_last_step
    # the last step of each text may be cut
    if not tokens - uncounted <= most <= tokens + answers * (counters.k + 1):
        raise UserError(
            f"{server.http.url} counted {counters.num_drafts:.0f} steps, for {most:.0f} tokens, but {tokens} tokens "
            "arrived here, so the server also answered other clients; repeat the command while nothing else uses the "
            "server"
        )


def renumbered(runs: Sequence[ServedGeneration], refused: Sequence[int]) -> list[ServedGeneration]:
    """Return the generations without those of refused prompts. Prompts after them are numbered anew."""
    return [
        run.model_copy(update={"prompt": run.prompt - sum(n < run.prompt for n in refused)})
        for run in runs
        if run.prompt not in refused
    ]
