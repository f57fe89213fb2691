"""Settings of the commands that train."""

from pathlib import Path

from pydantic import field_validator, model_validator
from typing_extensions import Self

from draftlab.config import inputs, shared
from draftlab.config.base import CHECKPOINTS, SERVER, TRAINING, Numbers, Only, OutputConfig, option
from draftlab.config.shared import ServerConnection, TrainingSettings, Vocab
from draftlab.console import note
from draftlab.model import hub
from draftlab.model.hf_files import check_id, check_trimmable

GENERATED, PARALLEL = "Generated text", "Parallel drafting"  # panels of --help


class DistillConfig(OutputConfig, TrainingSettings, ServerConnection):
    draft: str | None = option(None, "Checkpoint to train. Default: the newest pruned one.", reads=inputs.checkpoint)
    target: str = shared.target()
    data: str = shared.data()
    loss_on: shared.LossOn | None = shared.loss_on()
    text: shared.Texts = option(
        "data", "Train on the data itself, on text of the target, on text of the draft: data, or target=0.7,draft=0.3."
    )
    outputs: Path | None = option(
        None, "Stored target outputs to distil from, instead of a target and text.", reads=inputs.store
    )
    prompt_file: Path | None = option(
        None, "With --text target: JSON-lines file of prompts that the target answers, instead of data.",
        panel=GENERATED, reads=inputs.prompts,
    )  # fmt: skip
    chat: shared.ChatMode = shared.chat(panel=GENERATED, advanced=True)
    system_prompt: str | None = shared.system_prompt(panel=GENERATED)
    max_new_tokens: int = option(128, "Longest answer to a prompt.", ge=2, panel=GENERATED)
    vocab: Vocab = shared.draft_vocab("the text that is trained on")
    loss: shared.LossName = shared.loss()
    temperature: float = shared.loss_temperature()
    top_logprobs: int = option(20, "Most probable tokens to ask a server for.", ge=1, panel=SERVER, advanced=True)
    prompt_tokens: int = option(32, "Tokens of data before each generated text.", ge=1, panel=GENERATED, advanced=True)
    sample_temperature: float = option(
        1.0, "Temperature at which target and draft generate training text.", ge=0, panel=GENERATED, advanced=True
    )
    eval_temperature: float = option(
        0.0, "Temperature at which acceptance length is evaluated; 0 is greedy.", ge=0, panel=CHECKPOINTS,
        advanced=True,
    )  # fmt: skip
    parallel: int = option(
        1, "Tokens that the draft learns to predict in one pass, from mask tokens (PARD); 1: an ordinary draft.", ge=1,
        le=32, panel=PARALLEL,
    )  # fmt: skip
    pard_token: int | None = option(
        None, "Id of the mask token. Default: an id that no text has.", ge=0, panel=PARALLEL, advanced=True
    )
    cod_share: float = option(
        0.7, "Share of the positions of each offset that predict the next one, too; 1: all.", gt=0, le=1,
        panel=PARALLEL, advanced=True,
    )  # fmt: skip
    cod_floor: float = option(
        0.2, "Least share of all positions that predict an offset.", ge=0, le=1, panel=PARALLEL, advanced=True
    )
    lora_rank: int = shared.lora_rank()
    gradient_checkpointing: bool = shared.gradient_checkpointing()
    reweigh_steps: int = shared.reweigh_steps()
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()
    memory: float = shared.memory()

    only = (
        Only(
            ("target", "data", "text", "server", "seq_len", "reweigh_steps", "loss_on"),
            lambda c: c.outputs is None,
            "--outputs brings text and the target's probabilities",
        ),
        Only(
            ("prompt_file",),
            lambda c: c.text == "target" and c.outputs is None,
            "the target answers its prompts: add --text target, without --outputs",
        ),
        Only(
            ("data", "seq_len", "reweigh_steps", "prompt_tokens", "loss_on"),
            lambda c: c.prompt_file is None,
            "the text is that of --prompt-file",
        ),
        Only(("max_new_tokens",), lambda c: c.prompt_file is not None or c.may_answer_data, "needs --prompt-file"),
        *shared.CHAT_RULES,
        Only(("server",), lambda c: c.compares_with_target, "--loss ce asks no target"),
        Only(("served_model", "api_key_file", "top_logprobs"), lambda c: c.server, "there is no --server"),
        Only(("target", "reweigh_steps"), lambda c: c.server is None, "--server runs the target"),
        Only(("target", "device_map"), lambda c: c.needs_target, "no target is loaded here"),
        Only(("prompt_tokens", "sample_temperature"), lambda c: c.generates, "only for --text target or draft"),
        Only(("eval_temperature",), lambda c: c.evaluates_length, "needs a target in memory and a loss that uses it"),
        Only(("memory",), lambda c: c.needs_target or c.generates, "nothing is generated and no target is loaded here"),
        Only(("temperature",), lambda c: c.outputs or c.compares_with_target, "--loss ce has no temperature"),
        Only(("pard_token", "cod_share", "cod_floor"), lambda c: c.parallel > 1, "needs --parallel"),
        Only(("lora_rank",), lambda c: c.parallel == 1, "adapters leave out the embedding of --parallel's mask token"),
    )

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
    def compares_with_target(self) -> bool:
        """True if the loss has a term besides cross-entropy."""
        return shared.names(self.loss) != {"ce"}

    @property
    def may_answer_data(self) -> bool:
        """True if the target answers the data's prompts, in case these are conversations, which only its rows tell."""
        return self.text == "target" and self.outputs is None and self.data.endswith(".jsonl")

    @property
    def trains_on_windows(self) -> bool:
        """True if text is read, or written, in sequences of one length."""
        return self.outputs is None and self.prompt_file is None

    @property
    def generates(self) -> bool:
        """True if a model writes training text."""
        return self.outputs is None and bool(shared.names(self.text) & {"target", "draft"})

    @property
    def needs_target(self) -> bool:
        """True if the target's checkpoint is loaded."""
        asked = self.compares_with_target or "target" in shared.names(self.text) or self.reweigh_steps > 0
        return self.outputs is None and self.server is None and asked

    @property
    def evaluates_length(self) -> bool:
        """True if evaluations measure acceptance length, on text that the target writes."""
        return self.needs_target and self.compares_with_target and self.prompt_file is None

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        if self.trains_on_windows:
            inputs.check_fits(self.seq_len, self.draft, self.target if self.needs_target else None)
        if self.needs_target:
            inputs.check_vocabularies(self.target, str(self.draft))
        draft = hub.local(str(self.draft))
        if self.vocab is not None and draft is not None:
            check_trimmable(draft, self.vocab)
        if self.pard_token is not None and draft is not None:
            check_id(draft, self.pard_token, "--pard-token")

    def resolved(self) -> Self:
        if self.draft is not None:
            return self
        draft = shared.newest_output("prune")
        note(f"draft: {draft}")
        return self.model_copy(update={"draft": str(draft)})

    def default_name(self) -> str:
        draft = Path(self.draft) if self.draft else shared.newest_output("prune")
        return f"distill-{hub.checkpoint_name(draft).removeprefix('prune-')}"


class EagleConfig(OutputConfig, TrainingSettings):
    target: str = shared.target()
    data: str = shared.data()
    loss_on: shared.LossOn | None = shared.loss_on()
    text: shared.Texts = option(
        "data", "Train on the data itself, or on text of the target: data, target, or data=0.3,target=0.7."
    )
    outputs: Path | None = option(
        None, "Stored target outputs to train on, instead of --data: what the target wrote.", reads=inputs.store
    )
    heads: Path | None = option(
        None, "Head to train on, in place of a new one: draftlab eagle's, or SpecForge's, SafeAILab's, speculators'.",
        reads=inputs.file,
    )  # fmt: skip
    ttt_steps: int = option(
        4, "Steps of training-time test: tokens in a row that the head learns to draft.", ge=1, le=16
    )
    loss: shared.LossName = shared.loss()
    temperature: float = shared.loss_temperature()
    lr: float = option(  # half of what pruned drafts take, by runs on SmolLM2-135M (docs/drafters.md)
        factory=lambda settings: shared.proven_lr(settings) / 2, help="Peak learning rate.", gt=0,
        panel=TRAINING, shown_default="0.002; with adamw 0.0005",
    )  # fmt: skip
    vocab: Vocab = shared.draft_vocab("the text that is trained on; by default a quarter of all")
    layer_ids: Numbers | None = option(
        None, "Layers of the target after which the head reads its states. Default: 2, n / 2, n - 3.", typed=str,
        advanced=True,
    )  # fmt: skip
    norm_before_residual: bool = option(
        False, "Take the residual after hidden_norm, which SGLang does not compute.", advanced=True
    )
    prompt_tokens: int = option(32, "Tokens of data before each generated text.", ge=1, panel=GENERATED, advanced=True)
    sample_temperature: float = option(
        1.0, "Temperature at which the target generates training text.", ge=0, panel=GENERATED, advanced=True
    )
    memory: float = shared.memory()
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()

    only = (
        Only(("data", "text", "loss_on"), lambda c: c.outputs is None, "--outputs brings text"),
        Only(("prompt_tokens", "sample_temperature", "memory"), lambda c: c.generates, "only for --text target"),
        Only(("vocab", "layer_ids", "norm_before_residual"), lambda c: c.heads is None, "--heads brings its own"),
    )

    @field_validator("text")
    @classmethod
    def _knows_the_texts(cls, text: str) -> str:
        if "draft" in shared.names(text):
            raise ValueError("the text of an EAGLE-3 head is the target's own; want data and target")
        return text

    @model_validator(mode="after")
    def _leaves_room_to_generate(self) -> Self:
        if self.generates:
            shared.check_prompt_tokens(self.prompt_tokens, self.seq_len)
        return self

    @property
    def generates(self) -> bool:
        """True if the target writes training text."""
        return self.outputs is None and "target" in shared.names(self.text)

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        inputs.check_fits(self.seq_len, self.target)

    def default_name(self) -> str:
        return f"eagle-{Path(self.target.partition('@')[0]).name}"
