"""Settings of the commands on stored target outputs."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from draftlab import workspace
from draftlab.config import inputs, shared
from draftlab.config.base import Config, DraftedTokens, Only, OutputConfig, numbers, option
from draftlab.config.drafters import check_drafter, parse_drafter
from draftlab.config.server_rules import SERVER_RULE_ONLY, AcceptanceSettings
from draftlab.model import hub
from draftlab.model.hub import checkpoint_name
from draftlab.sampling import SamplingParams

DISTILL_PROMPT_TOKENS, DISTILL_TEMPERATURE, DISTILL_TOP_LOGPROBS = 32, 1.0, 64
DISTILL_BATCH, REPLAY_BATCH = 64, 16
REPLAY_PROMPTS, REPLAY_PROMPT_TOKENS = 64, 64  # of a data source

_SERVER = (
    Only(("served_model", "tokenizer", "api_key_file"), lambda c: c.server, "needs --server"),
    Only(("target",), lambda c: c.tokenizer is None, "--tokenizer takes its place"),
    Only(("dtype", "device", "device_map", "memory"), lambda c: not c.server, "the server decides that itself"),
)


def _widths(value: object) -> object:
    return [int(word) for word in value.split(",")] if isinstance(value, str) else value


Widths = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_widths), Field(min_length=1)]


class OutputsBuildConfig(shared.TruncationSettings, shared.ServerSettings, OutputConfig):
    """use distill: rows of data, starts of data with what the target writes after them, or prompts of a file with the
    target's answers. use replay: prompts with the target's answers."""

    use: Literal["distill", "replay"] = option("distill", "What the outputs are for: distilling, or replaying drafts.")
    target: str = shared.target()
    data: str = shared.data()
    loss_on: shared.LossOn | None = shared.loss_on()
    prompt_file: Path | None = shared.prompt_file()
    prompt_split: Literal["all", "train", "heldout"] = option(
        "all", "Lines of the prompt file to answer: those that it has as training data, as held-out data, or all.",
        advanced=True,
    )  # fmt: skip
    chat: shared.ChatMode = shared.chat()
    system_prompt: str | None = shared.system_prompt()
    text: Literal["data", "target"] = option(
        "data", "To distil on: the data itself, or what the target writes after starts of it."
    )
    num_sequences: int = option(4096, "Sequences to distil on.", ge=1)
    seq_len: int = option(256, "Tokens per sequence, prompt included.", ge=8)
    num_prompts: int | None = option(None, "Prompts to answer. Default: all of a file; to replay data, 64.", ge=1)
    prompt_tokens: int | None = option(
        None, "Cut prompts to this length. Default: whole prompts of a file; of data, 32 to distil and 64 to replay.",
        ge=1,
    )  # fmt: skip
    max_new_tokens: int = option(128, "Longest answer to a prompt.", ge=2)
    temperature: float | None = option(
        None, "Temperature of the target, 0 is greedy. Default: 1 to distil, 0 to replay.", ge=0, panel=shared.SAMPLING
    )
    top_logprobs: int | None = option(
        None, "Most probable tokens stored at each position. Default: 64 to distil, 0 to replay.", ge=0
    )
    batch_size: int | None = option(
        None, "Prompts decoded together. Default: 64 to distil, 16 to replay.", ge=1, advanced=True
    )
    dtype: shared.WeightsDtype | None = option(
        None, "Data type of weights. Default: to distil as stored, to replay the workspace's.", advanced=True
    )
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()
    memory: float = shared.memory()
    seed: int = shared.seed()

    only = (
        *_SERVER,
        Only(
            ("text", "num_sequences", "seq_len", "loss_on"), lambda c: c.use == "distill" and c.prompt_file is None,
            "needs --use distill on data; prompts are answered",
        ),
        Only(
            ("num_prompts", "max_new_tokens"), lambda c: c.answers,
            "needs prompts to answer: --prompt-file, or --use replay",
        ),
        *shared.CHAT_RULES,
        Only(("prompt_split",), lambda c: c.prompt_file is not None, "needs --prompt-file"),
        Only(("data",), lambda c: c.prompt_file is None, "give prompts by --data or by --prompt-file, not by both"),
        Only(
            ("prompt_tokens", "temperature", "top_k", "top_p", "min_p"), lambda c: c.writes,
            "the target only reads the data; add --text target",
        ),
        Only(
            ("batch_size",), lambda c: c.writes and not c.server,
            "is for a target in memory that writes; a server batches by itself",
        ),
    )  # fmt: skip

    def check(self, *, weights: bool) -> None:
        super().check(weights=weights)
        if not self.answers and self.tokenizer is None:
            inputs.check_fits(self.seq_len, self.target)
        if self.answers and self.tokenizer is None:
            inputs.check_context(1 + self.max_new_tokens, "--max-new-tokens", self.target)

    @property
    def answers(self) -> bool:
        """Return whether the target answers prompts, until it stops by itself."""
        return self.use == "replay" or self.prompt_file is not None

    @property
    def writes(self) -> bool:
        """Return whether the target writes the text."""
        return self.answers or self.text == "target"

    @property
    def prompt_length(self) -> int | None:
        """Tokens of each prompt; None: prompts of a file stay whole."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        if self.prompt_file is not None:
            return None
        return DISTILL_PROMPT_TOKENS if self.use == "distill" else REPLAY_PROMPT_TOKENS

    @property
    def weights_dtype(self) -> str | None:
        """None: as the weights are stored."""
        return self.dtype or (workspace.load().dtype if self.use == "replay" else None)

    @property
    def prompts_of_data(self) -> int:
        return self.num_prompts or REPLAY_PROMPTS

    @property
    def decoded_together(self) -> int:
        return self.batch_size or (DISTILL_BATCH if self.use == "distill" else REPLAY_BATCH)

    @property
    def listed(self) -> int:
        """Tokens listed at each position."""
        default = DISTILL_TOP_LOGPROBS if self.use == "distill" else 0
        return default if self.top_logprobs is None else self.top_logprobs

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams | None:
        """Return how the target writes; None: it only reads."""
        if not self.writes:
            return None
        default = DISTILL_TEMPERATURE if self.use == "distill" else 0.0
        longest = self.max_new_tokens if self.answers else self.seq_len + 1 - (self.prompt_length or 0)
        return SamplingParams(
            temperature=default if self.temperature is None else self.temperature, top_k=self.top_k, top_p=self.top_p,
            min_p=self.min_p, max_tokens=longest, seed=self.seed, stop_token_ids=stop_token_ids,
        )  # fmt: skip

    def default_name(self) -> str:
        name = self.tokenizer or Path(self.target.partition("@")[0])
        return f"outputs-{self.use}-{checkpoint_name(name)}"


class OutputsImportConfig(OutputConfig):
    file: Path = option(
        help="A server's requests in JSON lines (docs/formats.md), to distil from.", argument=True, reads=inputs.file
    )
    target: str = shared.target(reads=inputs.config_only)
    tokenizer: Path | None = option(
        None, "Directory of the target's tokenizer, if not that of --target.", reads=inputs.tokenizer
    )
    seq_len: int = option(256, "Tokens per sequence; longer texts are cut.", ge=8)
    top_logprobs: int = option(64, "At most that many tokens of each list.", ge=1)

    only = (Only(("target",), lambda c: c.tokenizer is None, "--tokenizer takes its place"),)

    def default_name(self) -> str:
        return f"outputs-{self.file.stem}"


class OutputsInfoConfig(Config):
    directory: Path = option(help="Directory of the outputs.", argument=True, reads=inputs.store)


class OutputsVerifyConfig(shared.ServerSettings, OutputsInfoConfig):
    target: str = shared.target()
    dtype: shared.WeightsDtype | None = option(None, "Data type of weights. Default: as stored.", advanced=True)
    device: shared.Device = shared.device()
    device_map: str | None = shared.device_map()
    memory: float = shared.memory()
    seed: int = shared.seed()

    only = _SERVER

    @property
    def weights_dtype(self) -> str | None:
        return self.dtype


class ReplayConfig(OutputConfig, AcceptanceSettings, shared.CheckpointSettings):
    """Settings of draftlab replay."""

    directory: Path = option(help="Directory of target outputs.", argument=True, reads=inputs.store)
    draft: list[str] = option(
        factory=list, help="Draft or EAGLE-3 head to replay; repeat for several. Default: the newest draft.",
        reads=inputs.checkpoint_or_head,
    )  # fmt: skip
    drafter: list[str] = option(
        factory=list, help="Other drafter that can be replayed, NAME or NAME:KEY=VALUE,...; repeat for several.",
        reads=check_drafter,
    )  # fmt: skip
    target: str = shared.target()
    k: DraftedTokens = numbers("1-8", "Numbers of drafted tokens, as 1-8 or 2,4,8.")
    tree: Widths | None = option(None, "A tree instead: branches at each depth, as 4,2,1.", typed=str)
    confidence: float | None = option(
        None, "Draft only while the draft's largest probability is at least this.", ge=0, le=1
    )
    unsure: Literal["keep", "drop"] = option(
        "keep", "The token that is below --confidence: keep it as transformers do, drop it as llama.cpp does."
    )
    rule: Literal["rejection", "match"] = option(
        "rejection", "rejection: accept with min(1, q/p); match: accept what is the target's own sample."
    )
    first: Literal["prefill", "prompt"] = option(
        "prefill", "The first token comes from the target's prefill, or is drafted like the others.", advanced=True
    )
    category: str | None = option(None, "Only prompts of this category.")
    parallel: bool = option(True, "Parallel drafts draft in one pass; --no-parallel: in one for each token.")
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: shared.Device = shared.device()

    only = (
        SERVER_RULE_ONLY,
        Only(("server_rule",), lambda c: c.acceptance.rule != "block", "blocks are not replayed; score measures them"),
        Only(("unsure",), lambda c: c.confidence is not None, "needs --confidence"),
        Only(("k", "confidence"), lambda c: c.tree is None, "--tree drafts a whole tree"),
        Only(
            ("target",),
            lambda c: c.reads_target,
            "only an EAGLE-3 head, or a drafter without a draft, reads its states",
        ),
        Only(("parallel",), lambda c: c.draft or not c.drafter, "a drafter says itself how it drafts"),
    )

    @property
    def reads_target(self) -> bool:
        """Return whether a drafter reads the states of the target."""
        return any(map(hub.is_eagle_head, self.draft)) or not all(parse_drafter(text).drafts for text in self.drafter)

    def default_name(self) -> str:
        return f"replay-{self.directory.name.removeprefix('outputs-').removeprefix('replay-')}"

    def resolved(self) -> "ReplayConfig":
        return self if self.draft or self.drafter else self.model_copy(update={"draft": [str(shared.newest_draft())]})
