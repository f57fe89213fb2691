"""Dynamic batch loading of Sheared LLaMA (2310.06694): a source whose loss exceeds its expected loss gets more rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftlab.config.shared import LossOn
from draftlab.console import note
from draftlab.data import Batch, DynamicBatches, TokenBatches, domain_of, open_heldout
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.training.loop import Hardware
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep

ROWS, BATCH = 16, 8  # number of held-out windows of each source, and of windows in a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reweighing:
    """Settings for updates of the weights of a data mixture, which follow the student's held-out losses.

    Args:
        every: Number of steps between updates of the weights.
        reference: Expected loss of each source in nats per token, by the source's name or domain. If it is a
            checkpoint, the held-out losses of this checkpoint are the expected losses.
    """

    every: int
    reference: Mapping[str, float] | Path

    @classmethod
    def of(cls, every: int, reference: str | Path | None, data: str, weights: bool) -> "Reweighing":
        """Return the settings for the mixture `data`.

        reference: SOURCE=LOSS,..., or the name or directory of a checkpoint. weights: Whether a checkpoint must have
        its weights on this machine.

        Raises:
            UserError: The reference cannot be used (see parse_reference).
        """
        assert reference is not None  # commands name a default
        if isinstance(reference, str):
            return cls(every=every, reference=parse_reference(reference, data, weights))
        return cls(every=every, reference=reference)

    def start(
        self,
        batches: TokenBatches,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        hardware: Hardware,
        loss_on: LossOn | None = None,
    ) -> DynamicBatches:
        """Return batches of the same sources, with weights that are updated during training.

        dtype, hardware: Dtype and devices on which a reference checkpoint computes its held-out losses.

        Raises:
            UserError: There is only one source, a source has too little held-out text, or the expected losses name
                other sources.
        """
        if len(batches.weights) < 2:
            raise UserError(
                "--reweigh-steps needs a mixture, but --data is a single source; write --data "
                "SOURCE=WEIGHT,SOURCE=WEIGHT, or leave --reweigh-steps out"
            )
        reference = self.reference
        if not isinstance(reference, Path):
            check_names(reference, batches.weights)
        heldout = {
            name: open_heldout(
                name,
                tokenizer,
                rows=min(BATCH, batches.rows),
                seq_len=batches.seq_len,
                most_rows=ROWS,
                loss_on=loss_on,
            ).batches
            for name in batches.weights
        }
        if isinstance(reference, Path):
            note(f"loading {hub.checkpoint_name(reference)} for its loss on each source")
            model = checkpoint.load_model(
                reference, dtype, hardware.resolved, hardware.device_map
            ).eval()
            losses = {name: _cross_entropy(model, rows) for name, rows in heldout.items()}
        else:
            losses = {name: reference[domain_of(name)] for name in batches.weights}
        return DynamicBatches.start(batches, heldout, losses, self.every)


def parse_reference(text: str, data: str, weights: bool) -> Mapping[str, float] | Path:
    """Parse --reference-losses: SOURCE=LOSS,..., or the name or directory of a checkpoint.

    Args:
        data: The mixture of sources.
        weights: Whether a checkpoint must have its weights on this machine.

    Raises:
        UserError: A loss is not a positive number, the sources are not those of `data`, or the checkpoint is missing.
    """
    if "=" not in text:
        return hub.locate_model(text, weights)
    losses: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        try:
            losses[name] = float(value)
        except ValueError:
            losses[name] = 0.0
        if not name or not 0 < losses[name] < float("inf"):
            raise UserError(
                f"--reference-losses: {part.strip()!r} is wrong; write SOURCE=LOSS with a loss above 0, in nats per "
                "token"
            )
    sources = hub.source_names(data)
    if all(hub.split_column(name)[1] is None for name in sources):
        check_names(losses, sources)
    return losses


def check_names(losses: Mapping[str, float], sources: Iterable[str]) -> None:
    """Check that the expected losses name exactly the sources.

    Raises:
        UserError: The names differ.
    """
    domains = [domain_of(name) for name in sources]
    if set(losses) != set(domains):
        raise UserError(
            f"--reference-losses has losses for {', '.join(losses)}, but the data has {', '.join(domains)}; write a "
            "loss for each source of the data"
        )


@torch.inference_mode()
def _cross_entropy(model: PreTrainedModel, batches: list[Batch]) -> float:
    step, device = DistillStep(model, parse_loss("ce"), 1.0), model.device
    sums = [
        step(torch.from_numpy(b.ids).to(device), torch.from_numpy(b.mask).to(device), None)
        for b in batches
    ]
    return float(sum(s[0, 1] for s in sums) / sum(b.predictions for b in batches))
