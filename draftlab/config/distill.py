"""Settings of distill."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, model_validator
from typing_extensions import Self

from draftlab.config import shared
from draftlab.config.base import (
    CHECKPOINTS,
    SERVER,
    TRAINING,
    Only,
    OutputConfig,
    from_workspace,
    option,
)
from draftlab.config.shared import (
    CheckpointSettings,
    Optimizer,
    ServerConnection,
    TrainingDtype,
    Vocab,
)
from draftlab.config.students import STUDENTS, Student
from draftlab.console import note
from draftlab.errors import did_you_mean
from draftlab.model.hub import ROW_FILES
from draftlab.registry import CROSS_ENTROPY, LOSSES

GENERATED = "Generated text"  # panel of --help
PROVEN_LR = {
    "muon": 4.0e-3,
    "adamw": 1.0e-3,
}  # the best of a sweep (benchmarks/results/distill_quality.json)
TEXTS = ("data", "target", "draft")  # names of text to train on


def _texts(spec: str) -> str:
    if unknown := sorted(shared.names(spec) - set(TEXTS)):
        raise ValueError(f"{unknown[0]!r} is unknown{did_you_mean(unknown[0], TEXTS)}")
    return spec


def _proven_lr(settings: dict[str, Any]) -> float:
    share = settings["student"].lr_share if "student" in settings else 1.0
    return PROVEN_LR[settings.get("optimizer", "muon")] * share


class DistillConfig(OutputConfig, CheckpointSettings, ServerConnection):
    """The student, the target that teaches it, the text, the loss, and how long."""

    student: Student = option(
        "draft",
        f"What to train: {', '.join(STUDENTS.names())}; NAME:KEY=VALUE,... sets its options (docs/distilling.md).",
        typed=str,
    )
    draft: str | None = option(
        None, "Checkpoint to train. Default: the newest pruned one; of heads, a new head."
    )
    target: str = from_workspace(
        "target", "Checkpoint of the target: a directory, or a hub name with @REVISION."
    )
    data: str = shared.data()
    text: Annotated[str, AfterValidator(_texts)] = option(
        "data",
        "Train on the data itself, on text of the target, on text of the draft: data, or target=0.7,draft=0.3.",
    )
    outputs: Path | None = option(
        None, "Stored target outputs to distil from, instead of a target and text."
    )
    prompt_file: Path | None = option(
        None,
        "With --text target: JSON-lines file of prompts that the target answers, instead of data.",
    )
    max_new_tokens: int = option(128, "Longest answer to a prompt.", ge=2)
    chat: shared.ChatMode = shared.chat(panel=GENERATED, advanced=True)
    system_prompt: str | None = shared.system_prompt(panel=GENERATED)
    loss_on: shared.LossOn | None = shared.loss_on(advanced=True)
    prompt_tokens: int = option(
        32, "Tokens of data before each generated text.", ge=1, panel=GENERATED, advanced=True
    )
    sample_temperature: float = option(
        1.0,
        "Temperature at which target and draft generate training text.",
        ge=0,
        panel=GENERATED,
        advanced=True,
    )
    loss: shared.LossName = option(
        "fkl",
        f"Loss, one of {', '.join([CROSS_ENTROPY, *LOSSES.names()])}; with a number: jsd(0.5), lk(3); a sum: "
        "0.9*fkl + 0.1*ce; in turn: fkl@0.2 -> lk(3).",
    )
    temperature: float = option(
        1.0, "Temperature of both distributions in the loss.", ge=0.01, advanced=True
    )
    vocab: Vocab = shared.draft_vocab("the text that is trained on")
    top_logprobs: int = option(
        20, "Most probable tokens to ask a server for.", ge=1, panel=SERVER, advanced=True
    )
    steps: int = option(500, "Optimizer steps.", ge=1, panel=TRAINING)
    batch_size: int = option(16, "Sequences per step, over all processes.", ge=1, panel=TRAINING)
    seq_len: int = option(256, "Tokens per sequence.", ge=8, panel=TRAINING)
    optimizer: Optimizer = option(
        "muon",
        "muon: Muon for the matrices of the blocks, AdamW for the other weights.",
        panel=TRAINING,
        advanced=True,
    )
    lr: float = option(
        factory=_proven_lr,
        help="Peak learning rate.",
        gt=0,
        panel=TRAINING,
        shown_default="0.004; with adamw 0.001; half for heads",
    )
    weight_decay: float = option(
        0.0, "Decoupled weight decay of matrices.", ge=0, panel=TRAINING, advanced=True
    )
    warmup_ratio: float = option(
        0.03,
        "Share of the steps in which the rate rises.",
        ge=0,
        le=1,
        panel=TRAINING,
        advanced=True,
    )
    training_dtype: TrainingDtype = option(
        "auto",
        "bfloat16: autocast with fp32 weights; auto: where that is fast.",
        panel=TRAINING,
        advanced=True,
    )
    micro_batch_tokens: int = option(
        4096,
        "Most tokens per forward pass, which bounds memory; 0: all of a step at once.",
        ge=0,
        panel=TRAINING,
        advanced=True,
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass: less memory, slower steps.",
        panel=TRAINING,
        advanced=True,
    )
    torch_compile: bool = option(
        False, "Compile the model: slower start, faster steps.", panel=TRAINING, advanced=True
    )
    reweigh_steps: int = option(
        0,
        "Steps between updates of a mixture's weights by held-out loss; 0: fixed weights.",
        ge=0,
        panel=TRAINING,
        advanced=True,
    )
    eval_steps: int = option(
        100, "Steps between held-out evaluations.", ge=1, panel=CHECKPOINTS, advanced=True
    )
    save_steps: int = option(
        100, "Steps between checkpoints to resume from.", ge=1, panel=CHECKPOINTS, advanced=True
    )
    report_to: list[str] = option(
        factory=list,
        help="Tracker to log to: tensorboard, trackio, wandb; repeat for several.",
        panel=CHECKPOINTS,
        advanced=True,
    )
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()
    memory: float = shared.memory()
    seed: int = shared.seed()

    only = (
        Only(
            ("target", "data", "text", "server", "seq_len", "reweigh_steps", "loss_on"),
            lambda c: c.outputs is None or c.on_target,
            "leave out what --outputs brings: text, and the target's probabilities",
        ),
        Only(("data", "text", "loss_on"), lambda c: c.outputs is None, "--outputs brings text"),
        Only(
            ("prompt_file",),
            lambda c: c.text == "target" and c.outputs is None,
            "the target answers its prompts: add --text target, without --outputs",
        ),
        Only(
            ("data", "reweigh_steps", "prompt_tokens", "loss_on"),
            lambda c: c.prompt_file is None,
            "the text is that of --prompt-file",
        ),
        Only(
            ("seq_len",),
            lambda c: c.prompt_file is None or c.on_target,
            "the text is that of --prompt-file",
        ),
        Only(
            ("max_new_tokens",),
            lambda c: c.prompt_file is not None or c.may_answer_data,
            "needs --prompt-file",
        ),
        *shared.CHAT_RULES,
        Only(("server",), lambda c: c.compares_with_target, "--loss ce asks no target"),
        Only(
            ("served_model", "api_key_file", "top_logprobs"), lambda c: c.server, "needs --server"
        ),
        Only(("target", "reweigh_steps"), lambda c: c.server is None, "--server runs the target"),
        Only(("target", "device_map"), lambda c: c.needs_target, "no target is loaded here"),
        Only(
            ("prompt_tokens", "sample_temperature"),
            lambda c: c.generates,
            "only for --text target or draft",
        ),
        Only(
            ("memory",),
            lambda c: c.needs_target or c.generates,
            "nothing is generated and no target is loaded here",
        ),
        Only(
            ("temperature",),
            lambda c: c.outputs or c.compares_with_target,
            "--loss ce has no temperature",
        ),
    )

    @model_validator(mode="after")
    def _student_uses_all(self) -> Self:
        if idle := [name for name in sorted(self.student.unused) if self.is_set(name)]:
            raise ValueError(
                f"{', '.join(map(self.flag, idle))}: --student {self.student.kind} does not use it"
            )
        return self

    @model_validator(mode="after")
    def _server_scores_only(self) -> Self:
        if self.server is not None and "target" in shared.names(self.text):
            raise ValueError(
                f"--text {self.text}: --server is asked for log-probabilities of given text only; store what its "
                "model writes with draftlab outputs build, and distil with --outputs"
            )
        return self

    @model_validator(mode="after")
    def _leaves_room_to_generate(self) -> Self:
        if self.trains_on_windows and self.generates:
            shared.check_prompt_tokens(self.prompt_tokens, self.seq_len)
        return self

    @property
    def on_target(self) -> bool:
        """Return whether the student is a head that reads the target's states, and so needs the target itself."""
        return not self.student.starts_from_draft

    @property
    def compares_with_target(self) -> bool:
        """Return whether the loss has a term besides cross-entropy."""
        return shared.names(self.loss) != {"ce"}

    @property
    def may_answer_data(self) -> bool:
        """Return whether the target answers the data's prompts if they are conversations, which only its rows tell."""
        return self.text == "target" and self.outputs is None and self.data.endswith(ROW_FILES)

    @property
    def trains_on_windows(self) -> bool:
        """Return whether text is read, or written, in sequences of one length."""
        return self.outputs is None and self.prompt_file is None

    @property
    def generates(self) -> bool:
        """Return whether a model writes training text."""
        return self.outputs is None and bool(shared.names(self.text) & {"target", "draft"})

    @property
    def needs_target(self) -> bool:
        """Return whether the target's checkpoint is loaded."""
        asked = (
            self.compares_with_target
            or "target" in shared.names(self.text)
            or self.reweigh_steps > 0
        )
        return self.on_target or (self.outputs is None and self.server is None and asked)

    def resolved(self) -> Self:
        if self.draft is not None or self.on_target:
            return self
        draft = shared.newest_output("prune")
        note(f"draft: {draft}")
        return self.model_copy(update={"draft": str(draft)})
