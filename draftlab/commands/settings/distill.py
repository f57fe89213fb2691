"""The settings of the command `distill`. Torch is not loaded."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, model_validator

from draftlab.config import shared
from draftlab.config.base import (
    CHECKPOINTS,
    SERVER,
    TRAINING,
    Only,
    OutputConfig,
    advanced_option,
    option,
)
from draftlab.config.shared import (
    CheckpointSettings,
    Optimizer,
    ServerSettings,
    TrainingDtype,
    Vocab,
)
from draftlab.console import note
from draftlab.errors import did_you_mean
from draftlab.model.hub import ROW_FILES, has_suffix
from draftlab.registry import CROSS_ENTROPY, LOSSES
from draftlab.training.students.base import STUDENTS, Student

GENERATED = "Generated text"  # panel of --help
# the best learning rates of a sweep (studies/losses)
PROVEN_LR = {"muon": 4.0e-3, "adamw": 1.0e-3}
TEXTS = ("data", "target", "draft")  # names in the value of --text


def _texts(spec: str) -> str:
    if unknown := sorted(shared.names(spec) - set(TEXTS)):
        raise ValueError(f"{unknown[0]!r} is unknown{did_you_mean(unknown[0], TEXTS)}")
    return spec


def _proven_lr(settings: dict[str, Any]) -> float:
    share = settings["student"].lr_share if "student" in settings else 1.0
    return PROVEN_LR[settings.get("optimizer", "muon")] * share


class DistillConfig(OutputConfig, CheckpointSettings, ServerSettings):
    """The settings of the command `distill`: the student, the target, the text, the loss and the length of training."""

    student: Student = option(
        "draft",
        f"Kind of draft to train: {STUDENTS.listed()}; NAME:KEY=VALUE,... sets its options (docs/distilling.md).",
        typed=str,
    )
    draft: str | None = option(
        None,
        "Checkpoint to train. Default: the newest pruned draft; for heads (--student eagle), a new head.",
    )
    target: str = shared.target()
    data: str = shared.data()
    text: Annotated[str, AfterValidator(_texts)] = option(
        "data",
        "Text to train on: data, target (text that the target writes), draft (text that the draft writes), or a "
        "mixture: target=0.7,draft=0.3.",
    )
    outputs: Path | None = option(None, "Stored target outputs to distil from, in place of the target and the text.")
    prompt_file: Path | None = option(
        None,
        "With --text target: JSON-lines file of prompts that the target answers, in place of --data.",
    )
    max_new_tokens: int = option(128, "Largest number of tokens of an answer.", ge=2)
    chat: shared.ChatMode = shared.chat(panel=GENERATED, advanced=True)
    system_prompt: str | None = shared.system_prompt(panel=GENERATED)
    loss_on: shared.LossOn | None = advanced_option(
        None,
        "Tokens of conversations (rows of messages) to train on: the tokens of the assistant, or all tokens. Default: "
        "assistant.",
    )
    prompt_tokens: int = advanced_option(
        32,
        "Number of tokens of data at the start of each sequence, which the target or the draft continues.",
        ge=1,
        panel=GENERATED,
    )
    sample_temperature: float = advanced_option(
        1.0, "Temperature at which target and draft generate training text.", ge=0, panel=GENERATED
    )
    loss: shared.LossName = option(
        "fkl",
        f"Loss: {LOSSES.listed(CROSS_ENTROPY)}. With a parameter: jsd(0.5). A sum: 0.9*fkl + 0.1*ce. "
        "A schedule: fkl@0.2 -> lk(3) uses fkl for the first 20 % of the steps, then lk(3).",
    )
    temperature: float = advanced_option(1.0, "Temperature of both distributions in the loss.", ge=0.01)
    vocab: Vocab = shared.draft_vocab("the training text")
    top_logprobs: int = advanced_option(
        20,
        "Number of most probable tokens that the server returns at each position.",
        ge=1,
        panel=SERVER,
    )
    steps: int = option(500, "Number of optimizer steps.", ge=1, panel=TRAINING)
    batch_size: int = option(16, "Number of sequences per step, over all processes.", ge=1, le=1 << 16, panel=TRAINING)
    seq_len: int = option(256, "Length of each sequence in tokens.", ge=8, panel=TRAINING)
    optimizer: Optimizer = advanced_option(
        "muon",
        "adamw: AdamW for all weights; muon: Muon for the matrices of the layers, and AdamW for all other weights.",
        panel=TRAINING,
    )
    lr: float = option(
        factory=_proven_lr,
        help="Peak learning rate.",
        gt=0,
        panel=TRAINING,
        shown_default="0.004; 0.001 with adamw; half of that for heads",
    )
    weight_decay: float = advanced_option(
        0.0, "Decoupled weight decay, as in AdamW, of the matrices.", ge=0, panel=TRAINING
    )
    warmup_ratio: float = advanced_option(
        0.03,
        "Fraction of the steps in which the learning rate rises to --lr.",
        ge=0,
        le=1,
        panel=TRAINING,
    )
    training_dtype: TrainingDtype = advanced_option(
        "auto",
        "bfloat16: autocast with fp32 weights; auto: bfloat16 on devices that are fast in it, else float32.",
        panel=TRAINING,
    )
    micro_batch_tokens: int = advanced_option(
        4096,
        "Largest number of tokens in a forward pass, which limits memory; 0: the whole batch in one pass.",
        ge=0,
        panel=TRAINING,
    )
    gradient_checkpointing: bool = advanced_option(
        False,
        "Recompute activations in the backward pass, which saves memory but makes steps slower.",
        panel=TRAINING,
    )
    torch_compile: bool = advanced_option(
        False, "Compile the model: the start is slower, but the steps are faster.", panel=TRAINING
    )
    reweigh_steps: int = shared.reweigh_steps()
    reference_losses: str | None = shared.reference_losses("target")
    eval_steps: int = advanced_option(
        100, "Number of steps between evaluations on held-out text.", ge=1, panel=CHECKPOINTS
    )
    save_steps: int = advanced_option(
        100,
        "Number of steps between checkpoints, from which a killed run resumes.",
        ge=1,
        panel=CHECKPOINTS,
    )
    report_to: list[str] = advanced_option(
        factory=list,
        help="Tracker to log to: tensorboard, trackio or wandb; repeat the option for several trackers.",
        panel=CHECKPOINTS,
        acts="always",
    )
    device: str = shared.device()
    device_map: shared.DeviceMap = shared.device_map()
    memory: float = advanced_option(2.0, "Limit on the memory for the target's logits and KV caches, in GB.", ge=0.01)
    seed: int = shared.seed()

    only = (
        Only(
            ("target", "server", "reweigh_steps"),
            lambda c: c.outputs is None or c.on_target,
            "leave it out, because --outputs has the text and the target's probabilities",
        ),
        Only(
            ("seq_len",),
            lambda c: c.outputs is None or c.on_target,
            "--outputs has sequences of its own lengths",
            refused=False,
        ),
        Only(
            ("data", "text", "loss_on"),
            lambda c: c.outputs is None,
            "leave it out, because --outputs has the text",
        ),
        Only(
            ("prompt_file",),
            lambda c: c.text == "target" and c.outputs is None,
            "works only with --text target, and without --outputs",
        ),
        Only(
            ("reweigh_steps",),
            lambda c: shared.names(c.text) == {"data"},
            "works only with --text data, because generated text has no sources",
        ),
        Only(
            ("data", "loss_on"),
            lambda c: c.prompt_file is None,
            "leave it out, because the text is the target's answers to --prompt-file",
        ),
        Only(
            ("prompt_tokens",),
            lambda c: c.prompt_file is None,
            "the text is the target's answers to --prompt-file",
            refused=False,
        ),
        Only(
            ("seq_len",),
            lambda c: c.prompt_file is None or c.on_target,
            "the text is the target's answers to --prompt-file",
            refused=False,
        ),
        Only(
            ("max_new_tokens",),
            lambda c: c.prompt_file is not None or c.may_answer_data,
            "works only with --text target and --prompt-file FILE, or a file of conversations in --data",
            refused=False,
        ),
        *shared.CHAT_RULES,
        Only(
            ("server",),
            lambda c: "target" not in shared.names(c.text),
            "here the target only scores text; first store its answers with draftlab outputs build --text target "
            "--server URL, then distil with --outputs DIRECTORY",
        ),
        Only(
            ("server",),
            lambda c: c.compares_with_target,
            "leave it out, because --loss ce does not use a target",
        ),
        shared.KEY_RULE,
        Only(
            ("temperature",),
            lambda c: c.server is None,
            "leave it out, because a server lists the target's probabilities at temperature 1",
        ),
        Only(("top_logprobs",), lambda c: c.server, "works only with --server URL", refused=False),
        Only(
            ("target",),
            lambda c: c.server is None,
            "leave it out, because --server runs the target",
        ),
        Only(
            ("reweigh_steps",),
            lambda c: c.server is None or c.reference_losses,
            "needs --reference-losses SOURCE=NATS, because --server runs the target",
        ),
        Only(("reference_losses",), lambda c: c.reweigh_steps, "works only with --reweigh-steps N", refused=False),
        Only(
            ("target",),
            lambda c: c.needs_target,
            "leave it out, because this run loads no target",
        ),
        Only(
            ("device_map",),
            lambda c: c.needs_target,
            "this run loads no target",
            refused=False,
        ),
        Only(
            ("memory",),
            lambda c: c.needs_target or c.generates,
            "this run loads no target and generates no text",
            refused=False,
        ),
        Only(
            ("temperature",),
            lambda c: c.outputs or c.compares_with_target,
            "leave it out, because --loss ce does not use a temperature",
        ),
        Only(
            ("prompt_tokens", "sample_temperature"),
            lambda c: c.generates,
            "works only with --text target or --text draft",
            refused=False,
        ),
    )

    @model_validator(mode="after")
    def _student_uses_all(self) -> Self:
        if idle := [name for name in sorted(self.student.unused) if self.is_set(name)]:
            raise ValueError(
                f"{', '.join(map(self.flag, idle))}: --student {self.student.kind} does not use this option; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _leaves_room_to_generate(self) -> Self:
        windows = self.generates and self.prompt_file is None
        if windows and self.seq_len <= self.prompt_tokens:
            raise ValueError(
                f"--prompt-tokens {self.prompt_tokens} leaves no room for generated text in sequences of --seq-len "
                f"{self.seq_len} tokens; lower --prompt-tokens"
            )
        return self

    @property
    def text_source(self) -> str | None:
        return self.data if self.outputs is None and self.prompt_file is None else None

    @property
    def addresses(self) -> dict[str, str | None]:
        return {"--server": self.server}

    @property
    def on_target(self) -> bool:
        """Return whether the student is a head, which reads the target's hidden states and so needs the target."""
        return not self.student.starts_from_draft

    @property
    def compares_with_target(self) -> bool:
        """Return whether the loss compares the student with the target. Only the loss `ce` alone does not."""
        return shared.names(self.loss) != {"ce"}

    @property
    def may_answer_data(self) -> bool:
        """Return whether the target answers the conversations in --data, if --data has conversations."""
        return self.text == "target" and self.outputs is None and has_suffix(self.data, ROW_FILES)

    @property
    def generates(self) -> bool:
        """Return whether the target or the draft writes training text."""
        return self.outputs is None and bool(shared.names(self.text) & {"target", "draft"})

    @property
    def needs_target(self) -> bool:
        """Return whether this run loads the checkpoint of the target."""
        asked = (
            self.compares_with_target
            or "target" in shared.names(self.text)
            or (self.reweigh_steps > 0 and self.reference_losses is None)
        )
        return self.on_target or (self.outputs is None and self.server is None and asked)

    def resolved(self) -> Self:
        if self.draft is not None or self.on_target:
            return self
        draft = shared.newest_output("prune")
        note(f"draft: {draft}")
        return self.model_copy(update={"draft": str(draft)})
