"""The loaded models of a comparison."""

from pathlib import Path

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import devices, hub
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.model.modes import load, with_mode
from draftlab.scoring.comparison import Comparison


class Models:
    """The models of a comparison. Each checkpoint is loaded once, at its first use."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.engine = comparison.engine
        self._loaded: dict[Path, Decoder] = {}
        self._running: dict[tuple[Path, bool], Decoder] = {}

    def eager(self, directory: Path) -> Decoder:
        """Return the model of a checkpoint in mode eager.

        Raises:
            UserError: The model cannot decode in batches.
        """
        if directory not in self._loaded:
            engine = self.engine
            note(f"loading {hub.checkpoint_name(directory)}")
            device_map = engine.device_map if directory == self.comparison.target else None
            model = load(directory, engine.dtype, engine.device, device_map)
            if self.comparison.batches != [1] and not model.takes_rows:
                raise UserError(f"{directory} cannot decode texts of different lengths in one batch; use --batch 1")
            self._loaded[directory] = model
        return self._loaded[directory]

    def running(self, directory: Path, int8: bool) -> Decoder:
        """Return the model of a checkpoint in the engine's mode. int8: Whether to round its weights to 8 bits."""
        if (directory, int8) not in self._running:
            model = self.eager(directory)
            running = with_mode(model, self.engine.mode, int8) if isinstance(model, Llama) else model
            self._running[directory, int8] = running
        return self._running[directory, int8]

    def weights(self, model: Decoder) -> str:
        """Return the precision of a model's weights: int8, the checkpoint's quantisation, or the engine's dtype."""
        return model.weights_dtype or devices.dtype_name(self.engine.dtype)

    def draft(self, directory: Path) -> Decoder:
        return self.running(directory, self.engine.draft_int8)

    @property
    def target(self) -> Decoder:
        return self.running(self.comparison.target, self.engine.target_int8)

    @property
    def other_target(self) -> Decoder | None:
        """Return the target at the other precision: with full weights if `target` has int8 weights, else with int8.

        Only plain decoding is timed with it. If plain decoding is timed at one precision only, return None, see
        Comparison.two_precisions.
        """
        if not self.comparison.two_precisions:
            return None
        return self.running(self.comparison.target, not self.engine.target_int8)
