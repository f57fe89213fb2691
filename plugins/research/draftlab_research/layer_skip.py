"""Options of layer skipping: the target drafts for itself without some of its layers."""

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, NonNegativeInt, model_validator

from draftlab.config.kinds import split_at
from draftlab.console import note
from draftlab.drafters.base import RunFacts, drafter
from draftlab.drafters.suffix import OutputsSpec
from draftlab.errors import UserError

if TYPE_CHECKING:
    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
    from draftlab.model.llama import Llama


@drafter("layer-skip")
class LayerSkipSpec(OutputsSpec):
    """Options of layer skipping.

    layers: Indices of the target's layers to keep. If empty, a search finds the layers with the highest predicted
    speed. outputs: Directory of stored target outputs for this search. If empty, the target completes prompts from the
    run's data.
    """

    own_engine = True
    layers: Annotated[list[NonNegativeInt], split_at("+")] = Field([])

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.layers != sorted(set(self.layers)):
            raise ValueError(f"layers must be in ascending order, without repeats, but are {self.layers}")
        if self.layers and self.outputs:
            raise ValueError("give layers or outputs, not both")
        return self

    @property
    def reads_data(self) -> bool:
        return not self.layers and not self.outputs

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.layers is not None and max(self.layers, default=0) >= run.layers:
            raise UserError(
                f"--drafter {self.text}: there is no layer {max(self.layers)}; the target has the layers 0 to "
                f"{run.layers - 1}"
            )

    def build(self, context: "DrafterContext") -> "DrafterRun":
        from draftlab.engine.generate import ModelDrafter
        from draftlab.model.modes import with_mode
        from draftlab_research.drafting.layer_skip import skip_layers

        target = context.own_engine(self, context.target)
        layers = self.layers or self._fastest_layers(context, target)
        model = with_mode(skip_layers(target, layers), context.mode, target.weights_dtype == "int8")
        learnt = None if self.layers else f"layer-skip:layers={'+'.join(map(str, layers))}"
        return context.run(ModelDrafter(model, context.vocab), model=model, learnt=learnt)

    @property
    def replays(self) -> bool:
        return bool(self.layers)

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        from draftlab.acceptance.token_logprobs import score_tokens
        from draftlab.model.llama import Llama
        from draftlab.model.native_cpu import NativeLlama
        from draftlab_research.drafting.layer_skip import skip_layers

        target = replay.load_target()
        if not isinstance(target, Llama):
            raise self.refused_by_transformers()
        model = skip_layers(target, self.layers)
        if isinstance(target, NativeLlama):
            model = NativeLlama(model, target.int8)
        return score_tokens(model, replay.texts, replay.vocab, replay.sampling, replay.advance)

    def _fastest_layers(self, context: "DrafterContext", target: "Llama") -> list[int]:
        from draftlab.model.modes import with_mode
        from draftlab_research.calibration import calibration_texts, pass_ms
        from draftlab_research.drafting.layer_skip import skip_layers
        from draftlab_research.layer_search import search_layers

        layers = target.shape.layers
        one_layer = with_mode(skip_layers(target, [0]), context.mode, target.weights_dtype == "int8")
        ms = pass_ms(context, {"all": target, "one": one_layer}, [1])
        all_ms, one_ms = ms["all"][0], ms["one"][0]
        layer_ms = (all_ms - one_ms) / (layers - 1)
        texts = calibration_texts(context, self.outputs)
        sets = search_layers(target, texts, context.sampling, lambda n: (one_ms + (n - 1) * layer_ms) / all_ms)
        best = max(sets, key=lambda candidate: candidate.speedup)
        note(
            f"{self.text}: the draft keeps {len(best.layers)} of {layers} layers, "
            f"layers={'+'.join(map(str, best.layers))}; "
            f"predicted {best.tokens_per_pass:.2f} tokens per target pass at K = {best.k}, speed-up {best.speedup:.2f}"
        )
        return list(best.layers)
