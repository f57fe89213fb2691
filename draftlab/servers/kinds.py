"""The interface of a kind of server. Each kind is defined in another module of this folder or in a plug-in.

In shapes, n is the number of tokens of a text, and k is the number of most probable ("top") tokens at each position.
Methods that read an incomplete answer raise KeyError, TypeError or similar errors. Torch is not imported.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
)

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from draftlab.config.server_rules import DecodingRule
from draftlab.errors import UserError
from draftlab.registry import SERVERS
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.shell import typed
from draftlab.trust import printable

if TYPE_CHECKING:
    from draftlab.model.shape import Shape

LARGEST_ID = 1 << 24

Answer = Any  # parsed JSON
TokenId = Annotated[int, Field(strict=True, ge=0, le=LARGEST_ID)]
# llama.cpp returns the smallest float32 as the logarithm of 0
Logprob = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-3.4028235e38)]
TopLogprobs = tuple[list[int], list[float]]  # k ids and log-probabilities, the most probable first
TOKEN_IDS = TypeAdapter(list[TokenId])


class RowError(UserError):
    """A server cannot answer one request, but it may answer other requests.

    Args:
        reason: Reason, without the address of the server.
        limited: Whether too many of these errors end a command.
    """

    def __init__(self, message: str, reason: str, *, limited: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.limited = limited


class DraftedTokens(UserError):
    """A server returned no log-probabilities of tokens, because it drafted them."""


class PromptLogprobs(BaseModel):
    """A server's log-probabilities of all tokens of a text but the first, and the k top tokens at each position."""

    model_config = ConfigDict(frozen=True)

    logprobs: list[Logprob]
    top_ids: list[list[TokenId]]  # [n][k], the most probable first; [] for k = 0
    top_logprobs: list[list[Logprob]]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(self.top_ids) not in (0, len(self.logprobs)):
            raise ValueError(f"{len(self.logprobs)} tokens have {len(self.top_ids)} lists of most probable tokens")
        if [*map(len, self.top_ids)] != [*map(len, self.top_logprobs)]:
            raise ValueError("top_ids and top_logprobs differ in length")
        return self


class ServerCompletion(BaseModel):
    """The n tokens that a server generated after a prompt, including eos."""

    model_config = ConfigDict(frozen=True)

    prompt_ids: list[int]
    ids: list[TokenId]
    # stop: the answer ended with eos; length: it has max_tokens tokens; None: unknown, because it comes from a log
    finish_reason: Literal["stop", "length"] | None = None


class ServedCompletion(ServerCompletion, PromptLogprobs):
    """A completion with the log-probabilities of its tokens."""

    @model_validator(mode="after")
    def _has_a_logprob_for_each_token(self) -> Self:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} tokens have {len(self.logprobs)} log-probabilities")
        return self

    def as_json(self) -> str:
        """Return the completion as a line of a server's log (docs/formats.md)."""
        return self.model_dump_json(exclude={"finish_reason"})


def check_same_ids(ids: list[int], scored: list[int]) -> None:
    """Check that log-probabilities are those of the tokens `ids`. Raises ValueError if not."""
    if ids != scored:
        raise ValueError("the log-probabilities belong to other tokens than those that were sent")


def top_k(entries: Sequence[tuple[int, float]], k: int) -> TopLogprobs:
    """Return the k most probable entries. An entry is a token id and its log-probability.

    Servers may list more than k entries, because they add the token of the text, even if it is improbable.

    Raises:
        DraftedTokens: There are no entries.
        ValueError: There are fewer than k entries.
    """
    if k and not entries:
        raise DraftedTokens("the answer has tokens without log-probabilities")
    top = sorted(dict(entries).items(), key=lambda entry: -entry[1])[:k]
    if len(top) < k:
        raise ValueError(f"a list has {len(top)} different tokens instead of the {k} most probable tokens")
    return [i for i, _ in top], [value for _, value in top]


def completion(
    prompt: list[int],
    written: tuple[list[int], Any],
    logprobs: list[float],
    tops: Sequence[TopLogprobs],
) -> ServedCompletion:
    """Check and return a completion. Raises ValueError: a value is missing, is not an id, or is not finite."""
    ids, reason = written
    return ServedCompletion(prompt_ids=prompt, ids=ids, logprobs=logprobs, finish_reason=reason, **_columns(tops))


def prompt_logprobs(tops: Sequence[TopLogprobs], actual: list[float]) -> PromptLogprobs:
    """Check the log-probabilities of a text, and return them. Raises ValueError: a value is missing or not finite.

    Args:
        tops: The top tokens at each position.
        actual: Log-probability of each token of the text after the first.
    """
    return PromptLogprobs(logprobs=actual, **_columns(tops))


def _columns(tops: Sequence[TopLogprobs]) -> dict[str, Any]:
    return {"top_ids": [ids for ids, _ in tops], "top_logprobs": [values for _, values in tops]}


DraftKind = Literal["draft model", "parallel draft", "EAGLE-3 head", "prompt lookup"]
SampleMethod = Literal["greedy", "probabilistic"]  # vLLM's draft_sample_method
ABOVE_ZERO = "above temperature 0 a drafted token is accepted with the target's probability of the token"
PROMPT_LOOKUP_MAX = 3  # longest n-gram to match (Saxena 2023, prompt lookup decoding)
# a JSON or YAML option with the path would break at these characters
SCRIPT_DIRECTORY = r"""here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
case $here in *[\"\\[:cntrl:]]*)
    echo "move this folder: its path has a quote, a backslash or a line break" >&2
    exit 1 ;;
esac"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a draft.

    Args:
        level: "error" if the draft cannot be used. "warning" if it works, but with a limitation.
        about: Name of the server, or of the part of the draft, that was checked.
        text: What was found.
        fix: What the user can do.
    """

    level: Literal["ok", "warning", "error"]
    about: str
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.level:7}  {self.about}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(about: str, text: str) -> Finding:
    return Finding("ok", about, text)


def warning(about: str, text: str, fix: str) -> Finding:
    return Finding("warning", about, text, fix)


def error(about: str, text: str, fix: str = "") -> Finding:
    return Finding("error", about, text, fix)


class ServedHead(Protocol):
    """The sizes of an EAGLE-3 head that the checks of a ServerKind read.

    Args:
        layer_ids: Layers of the target whose states the head reads. Id i is the residual stream after i layers.
        sliding_window: Number of latest tokens that the head's attention reads; None for all.
        optional_parts: Names of the head's options that some servers do not support.
    """

    @property
    def layer_ids(self) -> Sequence[int]: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def optional_parts(self) -> list[str]: ...


class Artifact(Protocol):
    """A draft model or an EAGLE-3 head with its target, in the form that the checks of a ServerKind read.

    Args:
        path: Directory of the draft or head.
        target: Directory of the target.
        config: Content of config.json.
        shape: Shape of the model; None if draftlab does not know the architecture.
        head: Sizes of a head; None for a draft.
        vocab: Number of logits of the draft.
        target_vocab: Number of logits of the target.
        in_parallel: Whether the draft proposes all tokens in one pass.
    """

    path: Path
    target: Path
    config: Mapping[str, Any]
    shape: "Shape | None"
    vocab: int
    target_vocab: int
    in_parallel: bool

    @property
    def head(self) -> ServedHead | None: ...

    def difference(self) -> str | None:
        """Return text that names a token in which draft and target differ, or None if their vocabularies are equal."""
        ...

    def spelled_alike(self) -> str:
        """Return how many of the target's tokens also exist in the draft, as text such as "100 of 200"."""
        ...

    def pre_tokenizer(self) -> tuple[str, float]:
        """Return llama.cpp's best pre-tokenizer for this tokenizer, and the fraction of probe texts with equal ids.

        Raises:
            UserError: llama.cpp cannot run the model.
        """
        ...


class About(NamedTuple):
    """What a server says about itself.

    Args:
        max_length: Most tokens of prompt and completion together; None if the server does not report it.
        slots: Number of requests that the server answers at once; None if it queues requests itself.
    """

    version: str
    max_length: int | None
    slots: int | None = None


class Sampling(NamedTuple):
    """The method by which a server's draft chooses tokens above temperature 0, and the reason for this method."""

    method: SampleMethod
    reason: str


DEFAULT_SAMPLING = Sampling(
    "probabilistic",
    "the default; draftlab export --verify-with --temperature compares it with greedy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of a script that starts a server. Control characters in target, reason and file are escaped.

    Args:
        k: Number of tokens to draft per step.
        reason: Reason for this K.
        file: Name of the draft's GGUF file in the script's folder. "" if the draft is a directory.
        layer_ids: Layers of the target that a head reads, see ServedHead.
        sliding_window: Window of a head, see ServedHead.
        heterogeneous: Whether draft and target have different vocabularies.
        own_target: Whether config.json of the head names its target and K, as in speculators' layout.
        limit: What users of the server must know about the draft's context, or "".
    """

    target: str
    k: int
    reason: str
    kind: DraftKind = "draft model"
    file: str = ""
    layer_ids: Sequence[int] = ()
    sliding_window: int | None = None
    heterogeneous: bool = False
    sampling: Sampling = DEFAULT_SAMPLING
    own_target: bool = False
    limit: str = ""

    def __post_init__(self) -> None:
        for name in ("target", "reason", "file", "limit"):
            object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTrial:
    """Settings of a server in float32 that draftlab starts to verify an export.

    Args:
        k: Number of tokens to draft per step.
        longest: Number of tokens of the longest prompt and its answer together.
        method: The draft's sampling method above temperature 0, for servers with several methods.
        own_target: Whether config.json of the head names its target and K, as in speculators' layout.
    """

    target: Path
    draft: Path
    kind: DraftKind
    k: int
    longest: int
    method: SampleMethod = "greedy"
    own_target: bool = False


class ServerKind:
    """A kind of server. A subclass overrides the attributes and methods for what its server supports."""

    name: ClassVar[str]  # set by @server

    # whether the server loads GGUF files instead of Hugging Face directories
    loads_gguf = False
    parallel = False  # whether a parallel draft drafts in one pass there
    # how the server drafts if draft and target have different vocabularies; empty: the server cannot
    translates = ""
    # largest allowed difference between the draft's and the target's number of logits
    vocab_slack = 0
    heads = ""  # how the server loads an EAGLE-3 head; empty: the server cannot
    # names in ServedHead.optional_parts that the server computes
    head_parts: ClassVar[frozenset[str]] = frozenset()
    one_stream = False  # whether the server decodes only one prompt at a time

    # decoding rules by variant, as in --server-rule NAME-VARIANT; script() starts the variant ""
    rules: ClassVar[Mapping[str, DecodingRule]] = {}

    program = ""  # program that export --verify-with starts; empty: none
    # starts of names of environment variables that would change a server which draftlab starts, such as its API key
    environment: ClassVar[tuple[str, ...]] = ()
    operands: ClassVar[tuple[str, ...]] = ()  # words that the start script needs after its name
    # True: the server never drafts beyond max_tokens; False: it may, and then counts all tokens of the last step
    cuts_last_step = False
    counts_end = True  # whether the server counts a drafted end-of-text token

    owned_by = ""  # name in /v1/models; empty: draftlab sends no requests
    path: ClassVar[str]  # address of completions and prompt log-probabilities
    about_path: ClassVar[str]  # address of a page with the version
    has_prompt_logprobs = True

    # loading

    def check(self, artifact: Artifact) -> Iterator[Finding]:
        """Check whether this server can run an exported draft or head, and yield problems and limitations."""
        if artifact.head is None:
            yield from self.check_vocabulary(artifact)
            if artifact.in_parallel and not self.parallel:
                text = "cannot draft in parallel, so this draft needs one pass for each drafted token"
                yield warning(
                    self.name,
                    text,
                    "serve it with vLLM or TensorRT-LLM, or distil an ordinary draft model",
                )
            yield from self.check_draft(artifact)
        elif self.heads:
            for part in artifact.head.optional_parts:
                if part not in self.head_parts:
                    fix = f"train the head without {part}, or serve it with vLLM"
                    yield error(self.name, f"does not support {part}, with which this head was trained", fix)
            yield from self.check_head(artifact, artifact.head)
        else:
            yield warning(
                self.name,
                "does not support EAGLE-3 heads",
                "serve the head with vLLM, SGLang, llama.cpp or TensorRT-LLM",
            )

    def check_draft(self, artifact: Artifact) -> Iterator[Finding]:
        """Check a draft model, apart from its vocabulary, and yield the problems on this server."""
        yield from ()

    def check_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        """Check a head that draftlab has exported for this server, and yield the problems."""
        yield from ()

    def check_stored_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        """Check config.json of a head that was not exported, and yield the problems that an export would fix."""
        yield from ()

    def check_published(self, artifact: Artifact) -> Iterator[Finding]:
        """Check a published head that the server loads without an export, and yield the problems."""
        yield from ()

    def check_vocabulary(self, artifact: Artifact) -> Iterator[Finding]:
        """Check the draft's vocabulary against the target's, and yield the problems on this server."""
        vocab = artifact.vocab
        targets = artifact.target_vocab
        if artifact.difference() is None:
            if abs(vocab - targets) > self.vocab_slack:
                allowed = f", or differ by at most {self.vocab_slack}" if self.vocab_slack else ""
                text = (
                    f"needs numbers of logits that are equal{allowed}, but the draft has {vocab:,} and the target "
                    f"{targets:,}"
                )
                resize = ("--to", self.name, "--target", artifact.target)
                yield error(self.name, text, typed("draftlab", "export", artifact.path, *resize))
            return
        transplant = typed("mergekit-tokensurgeon", artifact.path, artifact.target, "OUT")
        if not self.translates:
            yield error(self.name, "needs a draft with the target's vocabulary", transplant)
        else:
            alike = f"{artifact.spelled_alike()} of the target's tokens also exist in the draft"
            text = f"can translate between the two vocabularies: {self.translates}; {alike}"
            options = ("--target", artifact.target, "--to", self.name, "--use-heterogeneous-vocab")
            own = typed("draftlab", "export", artifact.path, *options)
            yield warning(self.name, text, f"{own}, or {transplant}")

    def lookup(self, device: str) -> str:
        """Return the name of the drafter that is the server's prompt lookup on a type of device, such as "cuda".

        Return "" if draftlab has no such drafter.
        """
        return ""

    # starting

    def script(self, launch: Launch) -> tuple[str, str]:
        """Return the name and the text of a script in the draft's directory that starts the server with the draft."""
        raise NotImplementedError

    def options(self, launch: Launch, draft: Path) -> list[object]:
        """Return the words that add the draft to a command line of the server, or [] if the script is needed.

        draft: Directory of the draft, an absolute path.
        """
        return []

    def command(self, program: Path, trial: ServerTrial) -> list[object]:
        """Return the command that starts a server for a verification, without host and port."""
        raise NotImplementedError

    # requests and answers

    def page(self, path: str, model: str) -> str:
        """Return the address of a page about a model."""
        return path

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> About:
        """Return what the server says about itself.

        page: The page at about_path. card: Entry of the model in /v1/models.
        """
        return About(page.get("version", "unknown"), card.get("max_model_len"))

    def shares_context(self, status: int, text: str) -> bool:
        """Return whether the server refused a request only because it answered too many other requests at once."""
        return False

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        """Return the body of a completion request. k: Number of top tokens per position; None requests only ids."""
        raise NotImplementedError

    def completion(self, prompt: list[int], answer: Answer, k: int) -> ServedCompletion:
        """Return the generated tokens with their log-probabilities.

        Raises:
            DraftedTokens: Tokens have no log-probabilities, because the server drafted them.
            RowError: Tokens of this answer have no log-probabilities for another reason.
        """
        raise NotImplementedError

    def written(self, answer: Answer) -> tuple[list[int], Any]:
        """Return the generated tokens, including eos, and the finish reason: stop or length."""
        raise NotImplementedError

    def counters(self, answer: Answer) -> Counters | None:
        """Return the speculative counters in an answer. None if the server reports them elsewhere or not at all."""
        return None

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        raise NotImplementedError

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        raise NotImplementedError

    def tokenize_request(self, text: str) -> dict[str, Any]:
        return {"prompt": text, "add_special_tokens": False}


Kind = TypeVar("Kind", bound=type[ServerKind])


def server(name: str) -> Callable[[Kind], Kind]:
    """Return a class decorator that registers a kind of server. It raises TypeError if a class lacks script()."""

    def decorate(kind: Kind) -> Kind:
        if kind.script is ServerKind.script:
            raise TypeError(f"{kind.__name__} has no method script()")
        kind.name = name
        SERVERS.register(name)(kind())
        return kind

    return decorate


def shell_script(launch: Launch, lines: Sequence[str]) -> tuple[str, str]:
    """Return the name and the text of a shell script, which begins with a comment on K and the reason for it.

    A running script prints the limit of the draft's context.
    """
    start = ["#!/bin/sh", f"# K = {launch.k}: {launch.reason}"]
    if launch.limit:
        start.append(f"echo {shlex.quote(launch.limit)} >&2")
    return "serve.sh", "\n".join([*start, *lines, ""])


def check_head_dim(name: str, size: int, supported: Sequence[int], fix: str, build: str) -> Iterator[Finding]:
    if size not in supported:
        yield warning(
            name,
            f"supports only head_dim {', '.join(map(str, supported))} {build}, but the draft has head_dim {size}",
            fix,
        )


def unknown_architecture(name: str, artifact: Artifact) -> Finding:
    kind = artifact.config.get("model_type")
    text = f"draftlab does not know whether this server's attention supports {kind} models"
    return warning(name, text, "start the server once with the draft as its only model")
