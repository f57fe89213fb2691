"""The drafter eagle: an EAGLE-3 head drafts chains from the target's states. Also base classes for other heads."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from draftlab.drafters import DrafterSpec, Input, RunFacts, drafter
from draftlab.drafters.fallback import GateSpec
from draftlab.errors import UserError
from draftlab.runs import provenance

if TYPE_CHECKING:
    import numpy as np
    import torch

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.engine.drafters.context import DrafterContext, DrafterRun
    from draftlab.engine.drafters.eagle import EagleDrafter
    from draftlab.engine.drafters.states import HeadPasses
    from draftlab.latency.steps import Passes
    from draftlab.model import Mode
    from draftlab.model.decoder import Decoder
    from draftlab.model.eagle_llama import EagleLlama
    from draftlab.model.hf_decoder import HFDecoder
    from draftlab.model.llama import Llama
    from draftlab.model.shape import Shape
    from draftlab.target_outputs.replay import ReplayContext


class HeadSpec(DrafterSpec):
    """Base class of drafters with a head that reads the target's states. heads: Directory of the head."""

    format: ClassVar[str]  # name of the kind of head, for messages
    # module that reads this kind of head, with check(folder, target) and load()
    module: ClassVar[str]
    file: ClassVar[str] = "config.json"  # file that every directory of a head has
    remedy: ClassVar[str] = ""  # end of the error message if the directory has no head

    heads: str

    @classmethod
    def model(cls) -> Any:
        return import_module(cls.module)

    @classmethod
    def read(cls, folder: Path, target: Path) -> Any:
        """Check a head, and return its sizes. Raises UserError: the folder has no such head for this target."""
        return cls.model().check(folder, target)

    def check(self, run: RunFacts) -> None:
        super().check(run)
        self.read(Path(self.heads), run.target)

    def inputs(self) -> list[Input]:
        return [Input(self.heads, self._check_heads), *super().inputs()]

    def _check_heads(self, name: str, weights: bool) -> None:
        if not (Path(name) / self.file).is_file():
            raise UserError(
                f"--drafter {self.text}: there is no {self.format} head in {name}, because {self.file} is "
                f"missing{self.remedy}"
            )

    def readable(self, target: "Decoder") -> "Llama | HFDecoder":
        """Return the target's model. Raises UserError: draftlab cannot read the states of its layers."""
        from draftlab.model.hf_decoder import HFDecoder
        from draftlab.model.llama import Llama

        if not isinstance(target, Llama | HFDecoder):
            raise self.refused_by_transformers()
        return target

    def facts(self) -> dict[str, object]:
        """Return the fields that describe the head in a score, see DrafterRun.facts."""
        return {"heads_sha256": provenance.fingerprint(Path(self.heads))}


class EagleHeadSpec(HeadSpec):
    """Drafts with an EAGLE-3 head.

    heads: Directory of a head from draftlab distill, or of a head in the layout of SpecForge, SafeAILab or speculators.
    """

    format = "EAGLE-3"
    module = "draftlab.model.eagle_llama"
    remedy = "; train a head with draftlab distill --student eagle"

    @classmethod
    def load(cls, folder: Path, target_path: Path, target: "Llama | HFDecoder", device: "torch.device") -> "EagleLlama":
        """Load a head on a device, for a target that is loaded already. Raises UserError: see read."""
        return cls.model().load(folder, target_path, target, device)

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> "Shape":
        return cls.read(folder, target).shape

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: "Llama | HFDecoder", mode: "Mode") -> "HeadPasses":
        from draftlab.engine.drafters.eagle import EaglePasses
        from draftlab.model import eagle_llama

        head = cls.load(folder, target_path, target, target.device)
        return EaglePasses(eagle_llama.with_mode(head, mode))

    @classmethod
    def drafter(cls, target: "Llama | HFDecoder", head: "EagleLlama") -> "EagleDrafter":
        from draftlab.engine.drafters.eagle import EagleDrafter

        return EagleDrafter(target, head)

    def head_drafter(self, context: "DrafterContext") -> "EagleDrafter":
        """Load the head, and return the drafter that uses it."""
        from draftlab.model import eagle_llama

        target = self.readable(context.target)
        model = self.load(Path(self.heads), context.target_path, target, context.device)
        return self.drafter(target, eagle_llama.with_mode(model, context.mode, context.int8))

    def chains(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        """Return the head's log-probabilities of the tokens of each text in a replay, in the form of acceptance()."""
        from draftlab.acceptance.chain_logprobs import score_chains

        target = self.readable(replay.load_target())
        head = self.load(Path(self.heads), replay.target_path, target, target.device)
        return score_chains(target, head, replay.texts, replay.vocab, replay.sampling, replay.most, replay.advance)


@drafter("eagle", served_by=("vllm", "sglang", "llama.cpp"))
class EagleSpec(EagleHeadSpec, GateSpec):
    """Drafts with an EAGLE-3 head, alone or after prompt lookup.

    prompt_lookup_max: Longest n-gram of prompt lookup. If set, prompt lookup drafts first, and the head drafts only for
    texts without a match. By default, the head drafts alone.
    """

    by_age = True
    cache_lag = 1  # the head reads the state of the prompt's last token together with the first token after the prompt
    prompt_lookup_max: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _gate_is_used(self) -> Self:
        if self.prompt_lookup_max is None and (idle := sorted(self.model_fields_set & {"min_match", "draft_tokens"})):
            raise ValueError(f"{', '.join(idle)}: needs prompt_lookup_max=N")
        return self

    def build(self, context: "DrafterContext") -> "DrafterRun":
        drafter = self.head_drafter(context)
        if self.prompt_lookup_max is None:
            return context.run(drafter, facts=self.facts() | {"eagle": True})
        return context.run(self.after_lookup(self.prompt_lookup_max, drafter, context.vocab), facts=self.facts())

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        return passes.step(k, unread=accepted + 1)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        chains = self.chains(replay)
        if self.prompt_lookup_max is None:
            return chains
        return self.replayed_after_lookup(replay, self.prompt_lookup_max, chains)
