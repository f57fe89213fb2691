"""A DFlash head (2602.06036): layers that draft a block of tokens in one pass, from the states of the frozen target."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from draftlab.config.kinds import student
from draftlab.training.students.eagle import HeadStudent, Layers

if TYPE_CHECKING:
    from draftlab.training.run import Distillation, OpenStudent


@student("dflash")
class DFlashStudent(HeadStudent):
    """Options of a DFlash head.

    block_size: Number of tokens of a block: the last token of the text, then block_size - 1 drafted tokens. num_layers:
    Number of layers of the head. Default: a sixth of the target's layers, at least 1 and at most 5. layer_ids: Layers
    of the target whose states the head reads, such as 2+12+21. Default: layers 2, n / 2 and n - 3 of a target with n
    layers. mask_token_id: Id of the mask token. Default: an id that no text has. anchors: Share of the predicted
    positions at which a block begins. The positions are drawn anew in each step. gamma: Drafted token k has the weight
    exp(-(k - 1) / gamma) in the loss. Default: half the block size.
    """

    free = frozenset({"anchors", "gamma"})
    unused = HeadStudent.unused | {"vocab"}
    lr_share = 1.0  # gives 0.004; on the embedded target tiny, 0.008 was even better after 60 steps
    block_size: int = Field(8, ge=2, le=32)
    num_layers: int | None = Field(None, ge=1, le=100)
    layer_ids: Layers = None
    mask_token_id: int | None = Field(None, ge=0)
    anchors: float = Field(0.125, gt=0, le=1)
    gamma: float | None = Field(None, gt=0)

    def check(self, job: "Distillation") -> None:
        super().check(job)
        from draftlab.training.dflash import head_of

        head_of(self, job)

    def facts(self, job: "Distillation") -> Mapping[str, object]:
        from draftlab.training import dflash

        return dflash.facts(self, job)

    def open(self, job: "Distillation", state: Path) -> "OpenStudent":
        from draftlab.training import dflash

        return dflash.open_head(self, job, state)
