"""Drafters as options: NAME or NAME:KEY=VALUE,... (docs/drafters.md), and what every kind of drafter has.

The kinds are in draftlab/drafters, a module each, and in plug-ins. No torch.
"""

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, PlainSerializer

from draftlab.config.kinds import KindSpec, parse_kind, text_or_spec
from draftlab.errors import UserError, about
from draftlab.model import Mode, hub
from draftlab.registry import REJECTION, Registry

PACKAGE = "draftlab.drafters"


def split_at(separator: str) -> BeforeValidator:
    """Return the validator of a list that is written as one text."""
    return BeforeValidator(
        lambda value: value.split(separator) if isinstance(value, str) else value
    )


@dataclass(frozen=True, slots=True)
class Input:
    """A file or directory that a drafter reads.

    name: a path, or a checkpoint of the hub; empty: the default draft of the run. check: raises UserError if the input
    is not there; it takes the name, and whether the files of weights are needed. is_model: the input is a draft model.
    """

    name: str
    check: Callable[[str, bool], None]
    is_model: bool = False

    def path(self, default: Path | None, weights: bool = True) -> Path | None:
        """Return where the input is. default: the default draft of the run. weights: False fetches none of the hub."""
        if not self.name:
            return default
        return hub.locate(self.name, weights) if self.is_model else Path(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run that a drafter has to fit. layers: None if transformers runs the target. draft: the default draft."""

    target: Path
    layers: int | None
    vocab: int
    mode: Mode
    rule: str
    draft: Path | None


class DrafterSpec(KindSpec):
    """A kind of drafter with its options."""

    served_by: ClassVar[frozenset[str]] = frozenset()  # servers that draft in the same way
    own_engine: ClassVar[bool] = False  # models that transformers runs are refused
    mode: ClassVar[Mode | None] = None  # the only mode in which it drafts
    rejection_rule: ClassVar[str] = REJECTION  # the rule that --rule rejection means for its drafts
    by_age: ClassVar[bool] = False  # acceptance of a token depends on how long ago its step began
    cache_lag: ClassVar[int] = 0  # tokens by which its cache is shorter than the target's

    @property
    def name(self) -> str:
        """Return the text as a file name."""
        return self.text.replace("/", "_")

    @property
    def reads_data(self) -> bool:
        """Return whether the drafter is built from the text of --data."""
        return False

    @property
    def eagle_head(self) -> Path | None:
        """Return the EAGLE-3 head of a drafter that drafts chains with it alone."""
        return None

    def speculative_config(self, k: int) -> dict[str, object] | None:
        """Return vLLM's --speculative-config for a drafter without weights; None where vLLM needs more, or lacks it."""
        return None

    def inputs(self) -> list[Input]:
        """Return all files and directories that the drafter reads."""
        return []

    def check_inputs(self, weights: bool) -> None:
        """Raises UserError: an input is not there. weights: its files of weights must be here, too."""
        for each in self.inputs():
            if each.name:
                with about(f"--drafter {self.text}"):
                    each.check(each.name, weights)

    @property
    def drafts(self) -> list[str]:
        """Return the names of its draft models; an empty name is the default draft."""
        return [each.name for each in self.inputs() if each.is_model]

    def paths(
        self, default: Path | None, *, weights: bool = True, models_only: bool = False
    ) -> list[Path]:
        """Return where its inputs are, or its draft models. Arguments as in Input.path."""
        chosen = [
            each.path(default, weights)
            for each in self.inputs()
            if each.is_model or not models_only
        ]
        return [path for path in chosen if path is not None]

    def check(self, run: RunFacts) -> None:
        """Check that the drafter fits the run; no model is loaded.

        Raises:
            UserError: the drafter does not fit.
        """
        if self.own_engine and run.layers is None:
            raise self.refused_by_transformers()
        if self.mode is not None and run.mode != self.mode:
            raise UserError(
                f"--drafter {self.text} works in mode {self.mode} only; this run is in mode {run.mode}"
            )

    def refused_by_transformers(self) -> UserError:
        return UserError(f"--drafter {self.text} does not work with models that transformers runs")

    def build(self, context: Any) -> Any:
        """Return the drafter as a DrafterRun. context: a DrafterContext (engine/drafters/context.py).

        Raises:
            UserError: a file that the drafter needs is missing, or does not fit the target.
        """
        raise NotImplementedError

    def acceptance(self, replay: Any) -> Any:
        """Return its view of each token of each text, a list of TokenLogprobs; [n, K] each if by_age, else [n].

        replay: a ReplayContext (acceptance/context.py).
        """
        raise NotImplementedError

    @classmethod
    def step_cost(cls, passes: Any, k: int, accepted: int) -> Any:
        """Return the milliseconds of drafting k tokens after a step that accepted some, by context, [C].

        passes: a Passes (latency/steps.py), of whose step() it is made.
        """
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Return whether the drafter has an acceptance."""
        return type(self).acceptance is not DrafterSpec.acceptance


Spec = TypeVar("Spec", bound=type[DrafterSpec])
DRAFTERS: Registry[type[DrafterSpec]] = Registry(
    PACKAGE,
    "drafter",
    {
        module.name.replace("_", "-"): f"{PACKAGE}.{module.name}"
        for module in pkgutil.iter_modules([str(Path(__file__).parent.parent / "drafters")])
    },
)


def drafter(name: str, *, served_by: Iterable[str] = ()) -> Callable[[Spec], Spec]:
    """Return a decorator that registers a kind of drafter. A kind inherits no servers and no acceptance.

    Raises:
        TypeError: the class does not define build().
    """

    def decorate(spec: Spec) -> Spec:
        if spec.build is DrafterSpec.build:
            raise TypeError(f"{spec.__name__} has no method build()")
        spec.kind, spec.served_by = name, frozenset(served_by)
        if "acceptance" not in vars(spec):
            spec.acceptance = DrafterSpec.acceptance  # pyright: ignore[reportAttributeAccessIssue]
        return DRAFTERS.register(name)(spec)

    return decorate


def parse_drafter(text: str) -> DrafterSpec:
    """Parse NAME or NAME:KEY=VALUE,... Raises UserError: The errors of parse_kind."""
    return parse_kind(text, DRAFTERS, "--drafter")


Drafter = Annotated[DrafterSpec, text_or_spec(parse_drafter), PlainSerializer(str)]
