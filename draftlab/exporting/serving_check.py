"""Compare a draft in a running server with the same draft here, and find the part of serving that differs.

"There" is the server, and "here" is this process. The server writes texts, and target and draft score them here. R
texts, n tokens in a text, K drafted tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draftlab.acceptance.token_logprobs import TokenLogprobs, score_tokens
from draftlab.data.text import chat_ids
from draftlab.errors import UserError
from draftlab.exporting import verify
from draftlab.exporting.artifact import Checkable, Form
from draftlab.exporting.verify import NothingDrafted, TargetTexts, Verification
from draftlab.heads.base import MOST_DRAFTED
from draftlab.intervals import FEWEST
from draftlab.model import checkpoint, modes
from draftlab.model.decoder import Decoder
from draftlab.model.sentencepiece import PROBES
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.servers.kinds import Finding, error, ok, warning
from draftlab.target_outputs.targets import ROUNDED_BELOW, TOLERANCE, check_server_tokenizer

# number of requests, and length in tokens of prompts from a data source
PROMPTS = 16
PROMPT_TOKENS = 48
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
        vocab = self.artifact.target_vocab
        try:
            answered = verify.ask(self.server, self.fitting, tokens=TOKENS, temperature=self.temperature, vocab=vocab)
        except NothingDrafted as failure:
            fix = "draftlab export writes a command that drafts"
            yield error("acceptance", str(failure), fix)
            return
        model = modes.load(self.target, torch.float32, self.device)
        yield from self._target(answered.texts, model)
        form = Form(to=self.server.adapter.name, server=self.server.adapter)
        found = verify.compare(
            self.server,
            answered,
            model,
            lambda texts: self.artifact.scores(self.artifact.path, form, texts, self.device),
            ends=checkpoint.eos_token_ids(self.target),
            vocab=vocab,
        )
        yield from self._acceptance(found)

    def _chat_template(self) -> Finding:
        about = "chat template"
        tokenizer = checkpoint.load_tokenizer(self.target)
        if not tokenizer.chat_template:
            return ok(about, "the target has no chat template here")
        own = chat_ids([{"role": "user", "content": PROBES[0]}], tokenizer, str(self.target))
        try:
            ids, count = self.server.chat_prompt(PROBES[0])
        except UserError as failure:
            return warning(about, f"not compared: {failure}", "send only completion requests to the server")
        if own == ids or (ids is None and len(own) == count):
            return ok(about, f"a chat of one message has {count} tokens on the server and here")
        text = f"a chat of one message has {count} tokens on the server, and {len(own)} other tokens here"
        fix = f"serve with the chat template of {self.target}, or train with the server's template"
        return error(about, text, fix)

    def _context(self) -> Iterator[Finding]:
        served = self.server.max_length
        own = self.artifact.context
        if served is not None and served > own:
            text = f"the server reads {served:,} tokens, but the draft only {own:,}"
            fix = f"limit the server's context to {own:,} tokens, because acceptance falls beyond the draft's context"
            yield warning("context", text, fix)
        elif served is not None:
            yield ok("context", f"the server reads {served:,} tokens, and the draft {own:,}")

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
            yield ok("precision", f"{text}, as expected of {'float32' if gap < SAME else '16 bits'}")

    def _acceptance(self, found: Verification) -> Iterator[Finding]:
        """Judge the acceptance, and the rule by which the server's draft samples."""
        by_position = zip(found.there, found.here, strict=False)
        positions = ", ".join(f"{a:.2f} / {b:.2f}" for a, b in by_position)
        text = f"{found.line()}; acceptance by position, server / draftlab: {positions}"
        if not found.expected.decides:
            fix = f"check with {FEWEST} prompts or more"
            yield warning("acceptance", f"{text}; these are too few texts to compare", fix)
        elif found.agrees:
            yield ok("acceptance", text)
        else:
            yield error("acceptance", text, hint(found.there, found.here))
        if found.temperature:
            lengths = found.by_method
            each = ", ".join(f"{name} {length.value:.3f}" for name, length in lengths.items())
            best = max(lengths, key=lambda name: lengths[name].value)
            text = f"the server's {found.measured:.3f} is nearest to a {found.method} draft ({each})"
            fix = f"in vLLM, set draft_sample_method to {best}, with which more tokens are accepted"
            yield ok("rule", text) if best == found.method else warning("rule", text, fix)


def mean_difference(own: Sequence[TokenLogprobs], there: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference between log-probabilities here and in the server, in nats.

    Only tokens of completions are compared. Tokens whose log-probability here is at most ROUNDED_BELOW are left out.

    Args:
        own: Log-probabilities here, of each completion.
        there: Log-probabilities in the server, of each prompt with its completion.
    """
    differences = [
        np.abs(scored.logprobs - np.array(row[len(row) - len(scored.logprobs) :]))[scored.logprobs > ROUNDED_BELOW]
        for scored, row in zip(own, there, strict=True)
    ]
    return float(np.concatenate(differences).mean())


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
