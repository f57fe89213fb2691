"""Drafters and students as options, NAME or NAME:KEY=VALUE,..., and the interface of every kind. No torch.

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

from draftlab.config.base import parsed
from draftlab.errors import UserError, about, did_you_mean, plain_words
from draftlab.model import Mode, hub
from draftlab.registry import REJECTION, Registry


class KindSpec(BaseModel):
    """A kind of drafter or student with its options. text: Text that the options were parsed from."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: ClassVar[str]

    text: str

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return a kind with these options. Its text is the text that a user would type."""
        words = ",".join(f"{name}={value}" for name, value in options.items())
        return cls(text=f"{cls.kind}:{words}" if words else cls.kind, **options)

    def __str__(self) -> str:
        return self.text


Spec = TypeVar("Spec", bound=KindSpec)


def parse_kind(text: str, registry: Registry[type[Spec]], option: str) -> Spec:
    """Parse NAME or NAME:KEY=VALUE,... option: Flag to name in errors.

    Raises:
        UserError: There is no such kind or option, or a value is out of range.
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
    """Return a validator that parses text to a spec, and passes a spec unchanged."""

    return BeforeValidator(lambda value: parsed(parse, value) if isinstance(value, str) else value)


def _complaint(item: dict[str, Any]) -> str:
    """Return the error message of one option, such as "order: ... (got 1)"."""
    message = plain_words(str(item["msg"]))
    if not item["loc"]:
        return message
    value = "" if item["type"] == "missing" else f" (got {item['input']!r})"
    return f"{item['loc'][0]}: {message}{value}"


PACKAGE = "draftlab.drafters"


def _modules(*package: str) -> dict[str, str]:
    """Return the modules of a package of draftlab by the name of their kind."""
    found = pkgutil.iter_modules([str(Path(__file__).parent.parent.joinpath(*package))])
    names = [module.name for module in found]
    return {name.replace("_", "-"): ".".join(("draftlab", *package, name)) for name in names}


def split_at(separator: str) -> BeforeValidator:
    """Return a validator that splits text into a list, and passes a list unchanged."""
    return BeforeValidator(
        lambda value: value.split(separator) if isinstance(value, str) else value
    )


@dataclass(frozen=True, slots=True)
class Input:
    """A file or directory that a drafter reads.

    Args:
        name: Path or hub name. An empty name stands for the run's default draft.
        check: Function of the name and of whether weight files are needed. Raises UserError if the input is missing.
        is_model: Whether the input is a draft model.
    """

    name: str
    check: Callable[[str, bool], None]
    is_model: bool = False

    def path(self, default: Path | None, weights: bool = True) -> Path | None:
        """Return the path of the input. default: The run's default draft. weights: Whether to fetch weight files."""
        if not self.name:
            return default
        return hub.locate(self.name, weights) if self.is_model else Path(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run, by which a drafter checks that it fits.

    layers: None if transformers runs the target. draft: The default draft.
    """

    target: Path
    layers: int | None
    vocab: int
    rule: str
    draft: Path | None


class DrafterSpec(KindSpec):
    """A kind of drafter with its options."""

    served_by: ClassVar[frozenset[str]] = frozenset()  # servers that have this drafter
    own_engine: ClassVar[bool] = False  # True: transformers may not run the target
    rejection_rule: ClassVar[str] = REJECTION  # the rule that --rule rejection means for its drafts
    by_age: ClassVar[bool] = (
        False  # True: acceptance of a token depends on its position in the draft
    )
    cache_lag: ClassVar[int] = 0  # tokens by which the drafter's cache is shorter than the target's

    @property
    def name(self) -> str:
        """Return the text as a file name."""
        return self.text.replace("/", "_")

    @property
    def reads_data(self) -> bool:
        """Return whether the drafter is built from the text of --data."""
        return False

    def speculative_config(self, k: int) -> dict[str, object] | None:
        """Return vLLM's --speculative-config for a drafter without weights. None if vLLM lacks the drafter."""
        return None

    def inputs(self) -> list[Input]:
        """Return the files and directories that the drafter reads."""
        return []

    def check_inputs(self, weights: bool) -> None:
        """Raise UserError if an input is missing. weights: Whether weight files must be present as well."""
        for each in self.inputs():
            if each.name:
                with about(f"--drafter {self.text}"):
                    each.check(each.name, weights)

    @property
    def drafts(self) -> list[str]:
        """Return the names of the drafter's draft models. An empty name stands for the default draft."""
        return [each.name for each in self.inputs() if each.is_model]

    def paths(
        self, default: Path | None, *, weights: bool = True, models_only: bool = False
    ) -> list[Path]:
        """Return the paths of all inputs, or of the draft models only. default, weights: See Input.path."""
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

    def refused_by_transformers(self) -> UserError:
        return UserError(
            f"--drafter {self.text} works only in draftlab's engine, but transformers runs this target"
        )

    def build(self, context: Any) -> Any:
        """Return the drafter as a DrafterRun. context: A DrafterContext (engine/drafters/context.py).

        Raises:
            UserError: A file that the drafter needs is missing, or does not fit the target.
        """
        raise NotImplementedError

    def acceptance(self, replay: Any) -> Any:
        """Return the drafter's log-probabilities of the tokens of the texts, a TokenLogprobs for each text.

        Shapes are [n] for a text of n tokens, or [n, K] if by_age: one column per position in the draft.
        replay: A ReplayContext (target_outputs/replay.py).
        """
        raise NotImplementedError

    @classmethod
    def step_cost(cls, passes: Any, k: int, accepted: int) -> Any:
        """Return the milliseconds to draft k tokens at each of C contexts, [C].

        Args:
            passes: A Passes (latency/steps.py), whose step() gives the time of a step.
            accepted: Draft tokens that the target accepted in the step before.
        """
        raise NotImplementedError

    @classmethod
    def is_priced(cls) -> bool:
        """Return whether predict knows the time of a step: whether the class defines step_cost()."""
        return cls.step_cost.__func__ is not DrafterSpec.step_cost.__func__

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> Any:
        """Return the size of a head, a Shape or an ApproximateSize (model/size.py), from which its profile is planned.

        Raises:
            UserError: There is no such head of this target.
        """
        raise NotImplementedError

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: Any, mode: Mode) -> Any:
        """Load a head with its target, and return its passes to time, a HeadPasses (engine/drafters/states.py)."""
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Return whether the drafter can be replayed: whether its class defines acceptance()."""
        return type(self).acceptance is not DrafterSpec.acceptance


DrafterKind = TypeVar("DrafterKind", bound=type[DrafterSpec])
DRAFTERS: Registry[type[DrafterSpec]] = Registry(PACKAGE, "drafter", _modules("drafters"))


def drafter(name: str, *, served_by: Iterable[str] = ()) -> Callable[[DrafterKind], DrafterKind]:
    """Return a decorator that registers a kind of drafter. Subclasses do not inherit served_by and acceptance().

    Raises:
        TypeError: The class does not define build().
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
    """Parse the text of --drafter. Raises UserError as parse_kind does."""
    return parse_kind(text, DRAFTERS, "--drafter")


Drafter = Annotated[DrafterSpec, text_or_spec(parse_drafter), PlainSerializer(str)]


class StudentSpec(KindSpec):
    """A kind of student with its options.

    Attributes:
        starts_from_draft: Whether training starts from a checkpoint: --draft or the newest pruned draft. If False,
            --draft names a student to train further, and without --draft a new student is made.
        unused: Settings of distill that the student would ignore. distill refuses them.
        lr_share: Factor of the default learning rate, which suits pruned drafts.
    """

    starts_from_draft: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset()
    lr_share: ClassVar[float] = 1.0

    def name(self, draft: Path, target: Path) -> str:
        """Return the name of the output. draft, target: Names that the user typed. draft is "." if not set."""
        return f"{self.kind}-{hub.checkpoint_name(target)}"

    def check(self, job: Any) -> None:
        """Check that a Distillation (training/run.py) can run, without reading weights.

        Raises:
            UserError: The student does not fit the target or the text.
        """

    def facts(self, job: Any) -> Mapping[str, object]:
        """Return the facts of a Distillation for a dry run."""
        raise NotImplementedError

    def open(self, job: Any, state: Path) -> Any:
        """Return the student of a Distillation as an OpenStudent, ready to be trained.

        state: Directory of the run, which stores text that the target generates.

        Raises:
            UserError: A checkpoint or text cannot be used.
        """
        raise NotImplementedError


StudentKind = TypeVar("StudentKind", bound=type[StudentSpec])
STUDENTS: Registry[type[StudentSpec]] = Registry(
    "draftlab.students", "student", _modules("training", "students")
)


def student(name: str) -> Callable[[StudentKind], StudentKind]:
    """Return a decorator that registers a kind of student.

    Raises:
        TypeError: The class does not define open() or facts().
    """

    def decorate(spec: StudentKind) -> StudentKind:
        for method in ("open", "facts"):
            if getattr(spec, method) is getattr(StudentSpec, method):
                raise TypeError(f"{spec.__name__} has no method {method}()")
        spec.kind = name
        return STUDENTS.register(name)(spec)

    return decorate


def parse_student(text: str) -> StudentSpec:
    """Parse the text of --student. Raises UserError as parse_kind does."""
    return parse_kind(text, STUDENTS, "--student")


Student = Annotated[StudentSpec, text_or_spec(parse_student), PlainSerializer(str)]
