"""The base class of drafters, and their registry. No torch: a kind's own module is imported when the kind is used.

Each kind of drafter is one module, in draftlab/drafters, in a folder of draftlab/heads, or in a plug-in
(docs/drafters.md): its options, the drafter, its acceptance in a replay, and its cost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from pydantic import PlainSerializer

from draftlab.config.kinds import KindSpec, parse_kind, text_or_spec
from draftlab.config.server_rules import server_of
from draftlab.errors import UserError, about
from draftlab.model import Mode, hub
from draftlab.registry import REJECTION, Registry

if TYPE_CHECKING:  # needs torch
    import numpy as np

    from draftlab.acceptance.token_logprobs import TokenLogprobs
    from draftlab.drafters.context import DrafterContext, DrafterRun, ReplayContext
    from draftlab.drafters.passes import HeadPasses, Passes
    from draftlab.model.hf_decoder import HFDecoder
    from draftlab.model.llama import Llama
    from draftlab.model.shape import Shape
    from draftlab.model.size import ApproximateSize


@dataclass(frozen=True, slots=True)
class Input:
    """A file or directory that a drafter reads.

    Args:
        name: Path or hub name. An empty name stands for the run's default draft.
        check: Function check(name, weights) that raises UserError if the input is missing. If weights is true, weight
            files must exist, too.
        is_model: Whether the input is a draft model.
    """

    name: str
    check: Callable[[str, bool], None]
    is_model: bool = False

    def path(self, default: Path | None, weights: bool = True) -> Path | None:
        """Return the path of the input. A draft model on the Hugging Face hub is downloaded first.

        default: The run's default draft, for an input without a name. weights: Whether to download weight files.
        """
        if not self.name:
            return default
        return hub.locate(self.name, weights) if self.is_model else Path(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run. A drafter reads them to check whether it fits the run.

    Attributes:
        layers: Number of the target's layers, or None if transformers runs the target.
        vocab: Size of the target's vocabulary.
        rule: Name of the verify rule.
        draft: The run's default draft, or None if the run has no such draft.
    """

    target: Path
    layers: int | None
    vocab: int
    rule: str
    draft: Path | None


class DrafterSpec(KindSpec):
    """The base class of drafters: one subclass for each kind, whose fields are the kind's options."""

    served_by: ClassVar[frozenset[str]] = frozenset()  # servers that have this drafter
    own_engine: ClassVar[bool] = False  # True: draftlab's engine must run the target
    # verify rule that --rule rejection selects for this drafter
    rejection_rule: ClassVar[str] = REJECTION
    # True: the acceptance of a token depends on its position in the draft
    by_age: ClassVar[bool] = False
    # number of tokens by which the drafter's KV cache is shorter than the target's
    cache_lag: ClassVar[int] = 0

    @property
    def name(self) -> str:
        """Return the text that the user typed, with "_" for "/", as a file name."""
        return self.text.replace("/", "_")

    @property
    def reads_data(self) -> bool:
        """Return whether the drafter is built from the text of --data."""
        return False

    def speculative_config(self, k: int) -> dict[str, object] | None:
        """Return vLLM's --speculative-config for k drafted tokens, or None if vLLM lacks the drafter.

        A drafter with weights returns None as well: draftlab export makes its configuration.
        """
        return None

    def inputs(self) -> list[Input]:
        """Return the files and directories that the drafter reads."""
        return []

    def check_inputs(self, weights: bool) -> None:
        """Check that all inputs exist. weights: Whether weight files must be present as well.

        Raises:
            UserError: An input is missing.
        """
        for each in self.inputs():
            if each.name:
                with about(f"--drafter {self.text}"):
                    each.check(each.name, weights)

    @property
    def drafts(self) -> list[str]:
        """Return the names of the drafter's draft models. An empty name stands for the run's default draft."""
        return [each.name for each in self.inputs() if each.is_model]

    def paths(self, default: Path | None, *, weights: bool = True, models_only: bool = False) -> list[Path]:
        """Return the paths of all inputs, or only those of the draft models.

        default: The run's default draft. weights: Whether to download weight files.
        """
        chosen = [each.path(default, weights) for each in self.inputs() if each.is_model or not models_only]
        return [path for path in chosen if path is not None]

    def check(self, run: RunFacts) -> None:
        """Check that the drafter fits the run. No model is loaded.

        Raises:
            UserError: The drafter does not fit.
        """
        if self.own_engine and run.layers is None:
            raise self.refused_by_transformers()

    def refused_by_transformers(self) -> UserError:
        return UserError(
            f"--drafter {self.text} works only in draftlab's engine, but transformers runs this target; use another "
            "--drafter"
        )

    def build(self, context: "DrafterContext") -> "DrafterRun":
        """Return the drafter ready to draft.

        Raises:
            UserError: A file that the drafter needs is missing, or does not fit the target.
        """
        raise NotImplementedError

    def acceptance(self, replay: "ReplayContext") -> "list[TokenLogprobs]":
        """Return the drafter's log-probability of each token of the completions, for each text of the replay.

        For a completion of n tokens, the shape is [n]. If by_age is set, it is [n, K], where K is the largest number
        of drafted tokens per step, and each column is for one position in the draft. It is [n, K, K] if a draft of
        fewer tokens need not be the beginning of a longer draft.
        """
        raise NotImplementedError

    @classmethod
    def step_cost(cls, passes: "Passes", k: int, accepted: int) -> "np.ndarray":
        """Return the milliseconds that a step takes to draft k tokens, for each number of cached tokens, [C].

        accepted: Number of drafted tokens that the target accepted in the previous step.
        """
        raise NotImplementedError

    @classmethod
    def is_priced(cls) -> bool:
        """Return whether draftlab predict can time this drafter, that is, whether its class defines step_cost()."""
        return cls.step_cost.__func__ is not DrafterSpec.step_cost.__func__

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> "Shape | ApproximateSize":
        """Return the size of a head, from which draftlab profile chooses the forward passes to time.

        Raises:
            UserError: The folder has no head for this target.
        """
        raise NotImplementedError

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: "Llama | HFDecoder", mode: Mode) -> "HeadPasses":
        """Load a head for its target, and return the forward passes to time.

        folder, target_path: Directories of the head and of the target. target: The loaded target.
        """
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Return whether the drafter can be replayed, that is, whether its class defines acceptance()."""
        return type(self).acceptance is not DrafterSpec.acceptance


DrafterKind = TypeVar("DrafterKind", bound=type[DrafterSpec])
DRAFTERS: Registry[type[DrafterSpec]] = Registry(
    "draftlab.drafters",
    "drafter",
    {
        "dflash": "draftlab.heads.dflash.drafter",
        "eagle": "draftlab.heads.eagle3.drafter",
        "fallback": "draftlab.drafters.fallback",
        "latest-lookup": "draftlab.drafters.lookup",
        "model": "draftlab.drafters.model",
        "ngram-gpu": "draftlab.drafters.ngram",
        "ngram-simple": "draftlab.drafters.ngram",
        "parallel": "draftlab.drafters.parallel",
        "prompt-lookup": "draftlab.drafters.lookup",
        "suffix": "draftlab.drafters.suffix",
    },
    elsewhere={"dspark": "draftlab-research", "peagle": "draftlab-research"},
)


def drafter(name: str, *, served_by: Iterable[str] = ()) -> Callable[[DrafterKind], DrafterKind]:
    """Return a decorator that registers a class as a kind of drafter with this name.

    A class that derives from another kind does not inherit served_by, acceptance() and step_cost() from it.

    served_by: Names of the servers that have this drafter.

    Raises:
        TypeError: The class does not define build().
        ValueError: Another kind has this name.
    """

    def decorate(spec: DrafterKind) -> DrafterKind:
        if spec.build is DrafterSpec.build:
            raise TypeError(f"{spec.__name__} has no method build()")
        spec.kind = name
        spec.served_by = frozenset(served_by)
        for method in ("acceptance", "step_cost"):
            owner = next(base for base in spec.__mro__ if method in vars(base))
            if owner is not spec and "kind" in vars(owner):
                setattr(spec, method, vars(DrafterSpec)[method])
        return DRAFTERS.register(name)(spec)

    return decorate


def parse_drafter(text: str) -> DrafterSpec:
    """Parse the text of --drafter. Raises UserError: there is no such drafter or option, or a value is wrong."""
    return parse_kind(text, DRAFTERS, "--drafter")


Drafter = Annotated[DrafterSpec, text_or_spec(parse_drafter), PlainSerializer(str)]


def check_served(spec: DrafterSpec, server_rule: str | None) -> None:
    """Check that the server of --server-rule has this drafter. draftlab's own drafters are not checked.

    Raises:
        UserError: The drafter is one of other servers.
    """
    if server_rule is None or not spec.served_by:
        return
    server, _ = server_of(server_rule)
    if server not in spec.served_by:
        raise UserError(
            f"--drafter {spec.text}: {server} has no {spec.kind}; it is that of "
            f"{', '.join(sorted(spec.served_by))}; use another --drafter or --server-rule"
        )
