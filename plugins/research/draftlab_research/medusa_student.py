"""Medusa heads (Cai et al. 2024, 2401.10774) as a student of `draftlab distill`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.errors import UserError
from draftlab.training.students.base import StudentSpec, student

if TYPE_CHECKING:
    from draftlab.training.run import Distillation, OpenStudent


@student("medusa")
class MedusaStudent(StudentSpec):
    """Options of Medusa heads as a student. heads: Number of heads, one for each drafted token."""

    unused = frozenset(
        {
            "draft",
            "outputs",
            "prompt_file",
            "server",
            "loss",
            "temperature",
            "vocab",
            "gradient_checkpointing",
            "reweigh_steps",
            "device_map",
        }
    )
    lr_share = 0.25  # gives 0.001, as in the paper; AdamW trains the heads, not Muon
    heads: int = Field(3, ge=1, le=8)

    def check(self, job: "Distillation") -> None:
        from draftlab.model import llama

        if set(job.text.shares) != {"data"} or job.answers is not None:
            raise UserError("--text: Medusa heads train only on data; leave --text out, and give the data with --data")
        assert job.target is not None  # a head reads the target's states
        llama.check_supported(job.target)  # in decoding, heads read states of draftlab's own engine

    def facts(self, job: "Distillation") -> Mapping[str, object]:
        from draftlab.model import llama

        assert job.target is not None  # a head reads the target's states
        shape = llama.check_supported(job.target)
        return {
            "heads": f"{self.heads}, with {shape.hidden**2:,} parameters each",
            "steps": job.loop.steps,
        }

    def open(self, job: "Distillation", state: Path) -> "OpenStudent":
        from draftlab_research import medusa_training

        return medusa_training.open_heads(self.heads, job)
