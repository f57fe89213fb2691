"""Drafters and students as options: NAME or NAME:KEY=VALUE,..., and what every kind of them has. No torch.

The kinds are in draftlab/drafters and draftlab/training/students, a module each, and in plug-ins
(docs/drafters.md, docs/distilling.md).
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from typing_extensions import Self

from draftlab.errors import UserError, about, did_you_mean, plain_words
from draftlab.model import Mode, hub
from draftlab.registry import REJECTION, Registry


class KindSpec(BaseModel):
    """A kind with its options. text: the text that they were parsed from."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: ClassVar[str]

    text: str

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return a kind with these options, and the text that a command line has for it."""
        words = ",".join(f"{name}={value}" for name, value in options.items())
        return cls(text=f"{cls.kind}:{words}" if words else cls.kind, **options)

    def __str__(self) -> str:
        return self.text


Spec = TypeVar("Spec", bound=KindSpec)


def parse_kind(text: str, registry: Registry[type[Spec]], option: str) -> Spec:
    """Parse NAME or NAME:KEY=VALUE,... option: the flag that the text was given by.

    Raises:
        UserError: no such kind or option, or a value out of range.
    """
    kind, _, rest = text.partition(":")
    where = f"{option} {text}"
    spec = registry.get(kind, where)
    pairs = [part.partition("=") for part in rest.split(",") if part]
    options: dict[str, Any] = {name: value for name, _, value in pairs}
    names = [name for name in spec.model_fields if name != "text"]
    if unknown := [name for name in options if name not in names]:
        raise UserError(
            f"{where}: {kind} has no option {unknown[0]!r}{did_you_mean(unknown[0], names)}"
        )
    try:
        return spec(text=text, **options)
    except ValidationError as error:
        complaints = [_complaint(dict(item)) for item in error.errors()]
        raise UserError(f"{where}: {'; '.join(complaints)}") from None


def text_or_spec(parse: Callable[[str], KindSpec]) -> BeforeValidator:
    """Return the validator of a setting that is a spec, or the text that it is parsed from."""

    def parsed(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(parsed)


def _complaint(item: dict[str, Any]) -> str:
    """Return the error of one option, as "order: ... (got 1)"."""
    message = plain_words(str(item["msg"]))
    if not item["loc"]:
        return message
    value = "" if item["type"] == "missing" else f" (got {item['input']!r})"
    return f"{item['loc'][0]}: {message}{value}"


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

        replay: a ReplayContext (target_outputs/replay.py).
        """
        raise NotImplementedError

    @classmethod
    def step_cost(cls, passes: Any, k: int, accepted: int) -> Any:
        """Return the milliseconds of drafting k tokens after a step that accepted some, by context, [C].

        passes: a Passes (latency/steps.py), of whose step() it is made.
        """
        raise NotImplementedError

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> Any:
        """Return the size of a head, to plan its profile: a Shape, or an ApproximateSize (model/size.py).

        Raises:
            UserError: There is no such head of this target.
        """
        raise NotImplementedError

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: Any, mode: Mode) -> Any:
        """Load a head on its target; return its passes to be timed, a HeadPasses (engine/drafters/states.py)."""
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Return whether the drafter has an acceptance."""
        return type(self).acceptance is not DrafterSpec.acceptance


DrafterKind = TypeVar("DrafterKind", bound=type[DrafterSpec])
DRAFTERS: Registry[type[DrafterSpec]] = Registry(
    PACKAGE,
    "drafter",
    {
        module.name.replace("_", "-"): f"{PACKAGE}.{module.name}"
        for module in pkgutil.iter_modules([str(Path(__file__).parent.parent / "drafters")])
    },
)


def drafter(name: str, *, served_by: Iterable[str] = ()) -> Callable[[DrafterKind], DrafterKind]:
    """Return a decorator that registers a kind of drafter. A kind inherits no servers and no acceptance.

    Raises:
        TypeError: the class does not define build().
    """

    def decorate(spec: DrafterKind) -> DrafterKind:
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


class StudentSpec(KindSpec):
    """A kind of student with its options.

    Attributes:
        starts_from_draft: Whether a checkpoint is trained, --draft or the newest pruned draft. Otherwise a new student
            of the target is trained, or the student of --draft.
        unused: Settings of distill that the student would ignore, so that they are refused.
        lr_share: Factor of the proven learning rate.
    """

    starts_from_draft: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset()
    lr_share: ClassVar[float] = 1.0

    def name(self, draft: Path, target: Path) -> str:
        """Return the name of the output, from the names that the user typed. The draft is "." if there is none."""
        return f"{self.kind}-{hub.checkpoint_name(target)}"

    def check(self, job: Any) -> None:
        """Check that a Distillation (training/run.py) can be run; weights are not read.

        Raises:
            UserError: the student does not fit the target or the text.
        """

    def facts(self, job: Any) -> Mapping[str, object]:
        """Return the facts of a Distillation for a dry run."""
        raise NotImplementedError

    def open(self, job: Any, state: Path) -> Any:
        """Return the student of a Distillation as an OpenStudent, ready to be trained.

        state: the directory of the run, in which text of the target is kept.

        Raises:
            UserError: a checkpoint or text that cannot be used.
        """
        raise NotImplementedError


StudentKind = TypeVar("StudentKind", bound=type[StudentSpec])
STUDENTS: Registry[type[StudentSpec]] = Registry(
    "draftlab.students",
    "student",
    {name: f"draftlab.training.students.{name}" for name in ("draft", "parallel", "eagle")},
)


def student(name: str) -> Callable[[StudentKind], StudentKind]:
    """Return a decorator that registers a kind of student.

    Raises:
        TypeError: the class does not define open() and facts().
    """

    def decorate(spec: StudentKind) -> StudentKind:
        for method in ("open", "facts"):
            if getattr(spec, method) is getattr(StudentSpec, method):
                raise TypeError(f"{spec.__name__} has no method {method}()")
        spec.kind = name
        return STUDENTS.register(name)(spec)

    return decorate


def parse_student(text: str) -> StudentSpec:
    """Parse NAME or NAME:KEY=VALUE,... Raises UserError: The errors of parse_kind."""
    return parse_kind(text, STUDENTS, "--student")


Student = Annotated[StudentSpec, text_or_spec(parse_student), PlainSerializer(str)]
