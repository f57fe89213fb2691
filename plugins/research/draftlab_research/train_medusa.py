"""python -m draftlab_research.train_medusa: train Medusa heads on the frozen target."""

from pathlib import Path

from draftlab.cli import run_alone
from draftlab.commands.base import Outcome, command, plan
from draftlab.config import inputs, shared
from draftlab.config.base import OutputConfig, option
from draftlab.config.shared import LoopSettings, TrainerSettings
from draftlab.output import Output


class MedusaConfig(OutputConfig, LoopSettings):
    heads: int = option(3, "Heads, each for one drafted token.", ge=1, le=8)
    target: str = shared.target()
    data: str = shared.data()
    batch_size: int = shared.batch_size(8)
    seq_len: int = shared.seq_len(ge=16)
    lr: float = shared.lr(1.0e-3)  # AdamW's, as in the paper: the heads are not matrices of blocks
    device: shared.Device = shared.device()

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        inputs.check_fits(self.seq_len, self.target)

    def default_name(self) -> str:
        return f"medusa-{Path(self.target.partition('@')[0]).name}"

    def training(self) -> TrainerSettings:
        """Return the settings of the trainer."""
        return TrainerSettings(
            steps=self.steps, batch_size=self.batch_size, warmup_ratio=self.warmup_ratio, lr=self.lr,
            training_dtype=self.training_dtype, eval_steps=self.eval_steps, save_steps=self.save_steps,
            save_total_limit=self.save_total_limit, patience=self.patience, seed=self.seed, optimizer="adamw",
        )  # fmt: skip


@command(MedusaConfig, dry_run=True)
def train_medusa(config: MedusaConfig, output: Output) -> Outcome:
    """Train Medusa heads on the frozen target, for score --drafter medusa:heads=DIR."""
    from draftlab_research import medusa_training

    if output.dry_run:
        return plan(output, medusa_training.plan_medusa(config))
    result = medusa_training.train_medusa(config, output)
    lines = [
        f"head {k}: held-out acceptance {head['acceptance']:.3f}, same token {head['agreement']:.3f}"
        for k, head in enumerate(result.heads, 1)
    ]
    text, path = f"{result.fitted.tokens:,} predictions in {result.fitted.seconds:.0f} s", str(output.out)
    facts = {"path": path, "heads": result.heads} | result.fitted.as_dict()
    return Outcome(path=output.out, show=[path, text, *lines], data=facts)


if __name__ == "__main__":
    run_alone(train_medusa)
