"""Prompt lookup, followed by a draft model if a match is too short. The shortest length is learnt from target texts."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.console import note
from draftlab.drafters import drafter
from draftlab.drafters.fallback import FALLBACK_LOOKUP_MAX, FallbackSpec
from draftlab.drafters.model import DraftModelSpec
from draftlab.drafters.ngram import OutputsSpec

if TYPE_CHECKING:
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.model.llama import Llama
    from draftlab_research.lookup_gate import Gate


@drafter("learnt-fallback")
class LearntFallbackSpec(DraftModelSpec, OutputsSpec):
    """Options of the drafter learnt-fallback.

    outputs: Directory of stored target outputs, from which the gate is learnt. prompt_lookup_max: Longest match that
    prompt lookup searches for.
    """

    own_engine = True
    outputs: str = Field("", min_length=1, validate_default=True)
    prompt_lookup_max: int = Field(FALLBACK_LOOKUP_MAX, ge=1)

    def build(self, context: "DrafterContext") -> "DrafterRun":
        model = context.own_engine(self, context.load_draft(self.text, self.draft))
        gate, plain_ms = self._gate(context, model)
        options = f"min_match={'x'.join(map(str, gate.min_match))},draft_tokens={gate.draft_tokens}"
        note(
            f"{self.text}: {options}; predicted speed-up at K = {gate.k}: {gate.speed * plain_ms:.2f}; "
            f"{gate.model_speed * plain_ms:.2f} with the draft model alone, {gate.ungated_speed * plain_ms:.2f} "
            "if every match is copied"
        )
        draft = f"draft={self.draft}," if self.draft else ""
        fixed = FallbackSpec(
            text=f"fallback:{draft}prompt_lookup_max={self.prompt_lookup_max},{options}",
            draft=self.draft,
            prompt_lookup_max=self.prompt_lookup_max,
            min_match=list(gate.min_match),
            draft_tokens=gate.draft_tokens,
        )
        return context.run(fixed.build(context).drafter, model=model, learnt=fixed.text)

    def _gate(self, context: "DrafterContext", draft: "Llama") -> "tuple[Gate, float]":
        """Learn the gate from stored texts of the target.

        Return the gate, and the milliseconds of a target pass over one token.
        """
        import numpy as np

        from draftlab.acceptance.expected import chances
        from draftlab.acceptance.token_logprobs import score_offsets, score_tokens
        from draftlab.target_outputs.store import read_manifest
        from draftlab_research.calibration import pass_ms, spread_outputs
        from draftlab_research.lookup_gate import learn_gate, replay_matches

        target, ks, longest = (
            context.own_engine(self, context.target),
            context.ks,
            self.prompt_lookup_max,
        )
        written = spread_outputs(self.outputs)
        texts = [(output.prompt, output.ids) for output in written]
        note(f"{self.text}: replaying {len(texts)} texts of the target")
        if draft.pard_token is None:
            scored = score_tokens(draft, texts, context.vocab, context.sampling)
        else:
            scored = score_offsets(
                draft, texts, context.vocab, context.sampling, max(ks), draft.pard_token
            )
        sampling = read_manifest(Path(self.outputs)).sampling
        alike = sampling is not None and 0 < sampling.temperature == context.sampling.temperature
        log_p = [
            o.logprobs if alike and o.logprobs is not None else np.zeros(len(o.ids))
            for o in written
        ]
        accepted = [
            chances(score.logprobs.T, own).T for score, own in zip(scored, log_p, strict=True)
        ]
        positions = replay_matches(texts, accepted, longest, max(ks))
        parallel_widths = {} if draft.pard_token is None else {k: 3 * k // 2 for k in ks}
        widths = sorted({1, *(k + 1 for k in ks), *parallel_widths.values()})
        ms = pass_ms(context, {"draft": draft, "target": target}, widths)
        draft_pass_ms, verify_ms = (
            dict(zip(widths, ms[name], strict=True)) for name in ("draft", "target")
        )
        draft_ms = {
            k: draft_pass_ms[parallel_widths[k]] if parallel_widths else k * draft_pass_ms[1]
            for k in ks
        }
        gate = learn_gate(positions, ks, longest, draft_ms.__getitem__, verify_ms.__getitem__)
        return gate, ms["target"][0]
