"""Dynamic batch loading of Sheared LLaMA (2310.06694): a source whose loss exceeds its expected loss gets more rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from transformers import PreTrainedModel

from draftlab.config.shared import LossOn
from draftlab.console import note
from draftlab.data import Batch, DynamicBatches, TokenBatches, domain_of, open_heldout
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.reading import reading
from draftlab.training.loop import Hardware
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep

NUMBERS = TypeAdapter(dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]])
# number of held-out windows of each source, and of windows in a pass
ROWS = 16
BATCH = 8


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

    def start(
        self,
        batches: TokenBatches,
        directory: Path,
        dtype: torch.dtype,
        hardware: Hardware,
        loss_on: LossOn | None = None,
    ) -> DynamicBatches:
        """Return batches of the same sources, with weights that are updated during training.

        directory: Checkpoint whose tokenizer and chat template made the batches.
        dtype, hardware: Dtype and devices on which a reference checkpoint computes its held-out losses.

        Raises:
            UserError: There is only one source, a source has too little held-out text, or the expected losses name
                other sources.
        """
        if len(batches.weights) < 2:
            raise UserError(
                "--reweigh-steps needs several sources, but --data names a single source; write --data "
                "SOURCE=WEIGHT,SOURCE=WEIGHT"
            )
        reference = self.reference
        tokenizer = checkpoint.load_tokenizer(directory)
        ends = checkpoint.eos_token_ids(directory)
        heldout = {
            name: open_heldout(
                name,
                tokenizer,
                rows=min(BATCH, batches.rows),
                seq_len=batches.seq_len,
                most_rows=ROWS,
                loss_on=loss_on,
                stop_token_ids=ends,
            ).batches
            for name in batches.weights
        }
        if isinstance(reference, Path):
            note(f"loading {hub.checkpoint_name(reference)} for its loss on each source")
            model = checkpoint.load_model(reference, dtype, hardware.resolved, hardware.device_map).eval()
            losses = {name: _cross_entropy(model, rows) for name, rows in heldout.items()}
        else:
            domains = {name: domain_of(name) for name in batches.weights}
            if set(reference) != set(domains.values()):
                raise UserError(
                    f"--reference-losses has losses for {', '.join(reference)}; write a loss for each of "
                    f"{', '.join(domains.values())}"
                )
            losses = {name: reference[domain] for name, domain in domains.items()}
        return DynamicBatches.start(batches, heldout, losses, self.every)


def parse_reference(text: str, weights: bool) -> Mapping[str, float] | Path:
    """Parse --reference-losses: SOURCE=LOSS,..., or the name or directory of a checkpoint.

    weights: Whether a checkpoint must have its weights on this machine.

    Raises:
        UserError: A loss is not a positive number, or the checkpoint is missing.
    """
    if "=" not in text:
        return hub.locate_model(text, weights)
    with reading(f"{text!r} is not SOURCE=LOSS,... with losses above 0 in nats per token"):
        return NUMBERS.validate_python(dict(part.strip().rsplit("=", 1) for part in text.split(",")))


@torch.inference_mode()
def _cross_entropy(model: PreTrainedModel, batches: list[Batch]) -> float:
    step = DistillStep(model, parse_loss("ce"), 1.0)
    device = model.device
    sums = [step(torch.from_numpy(b.ids).to(device), torch.from_numpy(b.mask).to(device), None) for b in batches]
    return float(sum(s[0, 1] for s in sums) / sum(b.predictions for b in batches))
