"""Compare a draft in a running server with the same draft here, and find the part of serving that differs.

"There" is the server, and "here" is this process. The server writes texts, and target and draft score them here. R
texts, n tokens in a text, K drafted tokens.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from draftlab.acceptance.token_logprobs import TokenLogprobs, score_tokens
from draftlab.data.text import chat_ids
from draftlab.engine.generate import decode, output_tokens
from draftlab.errors import UserError
from draftlab.exporting import verify
from draftlab.exporting.artifact import Checkable, Form
from draftlab.exporting.verify import TargetTexts
from draftlab.intervals import FEWEST, Interval, ratio
from draftlab.model import checkpoint, modes
from draftlab.model.decoder import Decoder
from draftlab.model.eagle import MOST_DRAFTED
from draftlab.model.sentencepiece import PROBES
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.scoring.servers import ServerAnswers, check_alone, read_metrics
from draftlab.servers.client import Server
from draftlab.servers.kinds import Finding, SampleMethod, error, ok, warning
from draftlab.target_outputs.targets import (
    ROUNDED_BELOW,
    TOLERANCE,
    check_ids,
    check_server_tokenizer,
)

# number of requests, and length of prompts from a data source in tokens
PROMPTS, PROMPT_TOKENS = (16, 48)
TOKENS = 48  # length of each answer in tokens
# largest mean difference of log-probabilities in nats if the server computes in float32
SAME = 1e-3
# fraction of greedy tokens that must be the same here if the server computes in 16 bits
SAME_TOKENS = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDraft:
    """A draft, and a running server that should serve it.

    Args:
        prompts: Token ids of each prompt.
        temperature: Temperature of the requests.
        device: Device on which draft and target run here.
    """

    artifact: Checkable
    server: Server
    prompts: list[list[int]]
    temperature: float
    device: torch.device

    @property
    def target(self) -> Path:
        return self.artifact.target

    @property
    def fitting(self) -> list[list[int]]:
        """Return the prompts that leave room for an answer in the contexts of server, target and draft.

        Raises:
            UserError: No prompt leaves this room.
        """
        limits = (
            self.artifact.context,
            checkpoint.max_model_len(self.target),
            self.server.max_length,
        )
        most = min(limit for limit in limits if limit is not None)
        prompts = [prompt for prompt in self.prompts if len(prompt) <= most - TOKENS - MOST_DRAFTED]
        if not prompts:
            raise UserError(
                f"server, target and draft read at most {most} tokens, but no prompt leaves room for an answer of "
                f"{TOKENS} tokens; give shorter prompts with --prompt-file"
            )
        return prompts

    def findings(self) -> Iterator[Finding]:
        """Yield findings about each part of serving, from the tokenizer to the verify rule.

        Raises:
            UserError: The server refuses a request, the server answers other clients during the check, or every prompt
                is too long for the check.
        """
        yield ok("server", self.server.describe())
        try:
            probe = check_server_tokenizer(self.server, self.target)
        except UserError as failure:
            yield error("tokenizer", str(failure))
            with contextlib.suppress(UserError):  # another vocabulary lacks ids of the prompts
                yield from self._layers()
            return
        if probe.split_alike:
            yield ok("tokenizer", "the server gives a probe text the same ids")
        else:
            text = "the server splits a probe text into other tokens of the same vocabulary"
            yield warning("tokenizer", text, "send token ids instead of text if this matters")
        yield from self._layers()

    def _layers(self) -> Iterator[Finding]:
        """Yield all findings except the tokenizer's. They need no tokenizer, because prompts are token ids."""
        yield self._chat_template()
        yield from self._context()
        asked = self._ask(self.fitting)
        if isinstance(asked, str):
            fix = "draftlab export writes a command that drafts"
            yield error("acceptance", f"the server {asked}", fix)
            return
        model = modes.load(self.target, torch.float32, self.device)
        texts, counters = asked
        yield from self._target(texts, model)
        yield from self._acceptance(texts, counters, model)

    def _chat_template(self) -> Finding:
        about, tokenizer = "chat template", checkpoint.load_tokenizer(self.target)
        if not tokenizer.chat_template:
            return ok(about, "the target has no chat template here")
        own = chat_ids([{"role": "user", "content": PROBES[0]}], tokenizer, str(self.target))
        try:
            ids, count = self.server.chat_prompt(PROBES[0])
        except UserError as failure:
            return warning(
                about, f"not compared: {failure}", "send only completion requests to the server"
            )
        if own == ids or (ids is None and len(own) == count):
            return ok(about, f"a chat of one message has {count} tokens on the server and here")
        text = f"a chat of one message has {count} tokens on the server, and {len(own)} other tokens here"
        fix = f"serve with the chat template of {self.target}, or train with the server's template"
        return error(about, text, fix)

    def _context(self) -> Iterator[Finding]:
        served, own = self.server.max_length, self.artifact.context
        if served is not None and served > own:
            text = f"the server reads {served:,} tokens, but the draft only {own:,}"
            fix = f"limit the server's context to {own:,} tokens, because acceptance falls beyond the draft's context"
            yield warning("context", text, fix)
        elif served is not None:
            yield ok("context", f"the server reads {served:,} tokens, and the draft {own:,}")

    def _ask(self, prompts: list[list[int]]) -> tuple[TargetTexts, Counters] | str:
        """Send prompts to the server, one after the other, and return the answers and the counters' growth.

        If the server drafted nothing, return why, as the predicate of a sentence about the server.

        Raises:
            UserError: The server also answered other clients meanwhile.
        """
        answers, completions = ServerAnswers(before=read_metrics(self.server)), []
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=TOKENS, temperature=self.temperature, seed=number)
            ids, _ = answers.ask(self.server, prompt, sampling, time.perf_counter)
            check_ids(ids, self.artifact.target_vocab, f"prompt {number}")
            completions.append(ids)
        answers.after = read_metrics(self.server)
        counters = answers.counters
        if counters is None:
            return answers.undrafted
        lengths = list(map(len, completions))
        check_alone(self.server, counters, lengths)
        texts = TargetTexts(
            prompts=prompts,
            completions=completions,
            tokens=lengths,
            k=counters.k,
            temperature=self.temperature,
        )
        return texts, counters

    def _target(self, texts: TargetTexts, model: Decoder) -> Iterator[Finding]:
        """Compare the target in the server with the target here, by log-probabilities of the tokens of the answers."""
        vocab = self.artifact.target_vocab
        own = score_tokens(model, texts.pairs, vocab, SamplingParams(temperature=1.0))
        same = float(np.concatenate([scored.ranks == 0 for scored in own]).mean())
        if texts.temperature == 0:
            text = f"{same:.1%} of the served tokens are the most probable tokens here"
            fix = "serve the same weights without adapters, or name the served model by --target"
            yield ok("target", text) if same >= SAME_TOKENS else error("target", text, fix)
        if not self.server.adapter.has_prompt_logprobs:
            yield ok("precision", f"not compared, because {self.server.kind} does not score texts")
            return
        rows = [p + c for p, c in zip(texts.prompts, texts.completions, strict=True)]
        there = [each.logprobs for each in self.server.prompt_logprobs(rows, 0)]
        gap = mean_difference(own, there)
        text = f"log-probabilities of the served tokens differ by {gap:.4f} nats from float32 here"
        if gap > TOLERANCE:
            fix = (
                f"serve the same weights in 16 bits, whose rounding gives less than {TOLERANCE} nats: the served "
                "target is quantised or has other weights"
            )
            yield error("precision", text, fix)
        else:
            yield ok(
                "precision", f"{text}, as expected of {'float32' if gap < SAME else '16 bits'}"
            )

    def _acceptance(
        self, texts: TargetTexts, counters: Counters, model: Decoder
    ) -> Iterator[Finding]:
        """Compare the acceptance by position in the draft, and find how the server's draft samples."""
        adapter, vocab = self.server.adapter, self.artifact.target_vocab
        if texts.temperature == 0:
            texts = extended(texts, model)
            texts = verify.before_end(texts, adapter, checkpoint.eos_token_ids(self.target))
        form = Form(to=adapter.name, server=adapter)
        scores = self.artifact.scores(self.artifact.path, form, texts, self.device)
        chances = verify.chances_of(scores, texts, lambda: model, vocab)
        counts = verify.counts_of(adapter, chances, texts)
        there = counters.acceptance
        measured = verify.measured_length(adapter, counters, texts.tokens)
        lengths: dict[SampleMethod, Interval] = {name: ratio(rows) for name, rows in counts.items()}
        method = min(lengths, key=lambda name: abs(lengths[name].value - measured))
        here = lengths[method]
        steps = verify.expected_steps(chances[method], texts.k)
        by_position = steps.acceptance().per_position_acceptance
        positions = ", ".join(
            f"{a:.2f} / {b:.2f}"
            for a, b in zip(there.per_position_acceptance, by_position, strict=False)
        )
        text = (
            f"{measured:.3f} tokens per target pass on the server, {here.text(3)} here at K = {texts.k}; "
            f"acceptance by position, server / here: {positions}"
        )
        if not here.decides:
            fix = f"check with {FEWEST} prompts or more"
            yield warning("acceptance", f"{text}; these are too few texts to compare", fix)
        elif here.low <= measured <= here.high:
            yield ok("acceptance", text)
        else:
            yield error("acceptance", text, hint(there.per_position_acceptance, by_position))
        if texts.temperature:
            each = ", ".join(f"{name} {length.value:.3f}" for name, length in lengths.items())
            best = max(lengths, key=lambda name: lengths[name].value)
            text = f"the server's {measured:.3f} is nearest to a {method} draft ({each})"
            fix = f"in vLLM, set draft_sample_method to {best}, with which more tokens are accepted"
            yield ok("rule", text) if best == method else warning("rule", text, fix)


def mean_difference(own: Sequence[TokenLogprobs], there: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference between log-probabilities here and in the server, in nats.

    Only tokens of completions are compared. Tokens whose log-probability here is at most ROUNDED_BELOW are left out.

    Args:
        own: Log-probabilities here, of each completion.
        there: Log-probabilities in the server, of each prompt with its completion.
    """
    differences = [
        np.abs(scored.logprobs - np.array(row[len(row) - len(scored.logprobs) :]))[
            scored.logprobs > ROUNDED_BELOW
        ]
        for scored, row in zip(own, there, strict=True)
    ]
    return float(np.concatenate(differences).mean())


def extended(texts: TargetTexts, model: Decoder) -> TargetTexts:
    """Continue greedy texts by k tokens of the target, because the server's last step may draft beyond their end."""
    rows = [p + c for p, c in zip(texts.prompts, texts.completions, strict=True)]
    more = output_tokens(decode(model, rows, SamplingParams(max_tokens=texts.k)))
    return replace(texts, completions=[c + m for c, m in zip(texts.completions, more, strict=True)])


def hint(there: Sequence[float], here: Sequence[float]) -> str:
    """Return advice about a difference in acceptance. It depends on whether the first drafted token differs already.

    there, here: Fraction of steps that accept at least i tokens, i = 1..K, in the server and here.
    """
    if abs(there[0] - here[0]) > 0.1 * max(here[0], 0.1):
        return (
            "the acceptance of the first drafted token differs already: the server has other layers, norms or "
            "weights than the draft, or another precision; serve what draftlab export writes"
        )
    return (
        "only the acceptance of later tokens differs: check the hidden state that the head reads again (norm_output, "
        "norm_before_residual), the sliding window, and whether the head was trained for as many tokens as K"
    )
