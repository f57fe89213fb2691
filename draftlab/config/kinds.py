"""The base classes of drafters and students, and the parser of their options, NAME or NAME:KEY=VALUE,... No torch.

Each kind of drafter is a module in draftlab/drafters or a plug-in (docs/drafters.md). Each kind of student is a module
in draftlab/training/students or a plug-in (docs/distilling.md).
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from draftlab.config.base import check_numbers, parsed
from draftlab.errors import UserError, about, did_you_mean
from draftlab.model import Mode, hub
from draftlab.reading import validation_text
from draftlab.registry import REJECTION, Registry


class KindSpec(BaseModel):
    """A drafter or a student with its options. text: The text that the user typed, such as fallback:draft_tokens=2."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: ClassVar[str]

    text: str

    @model_validator(mode="after")
    def _numbers_in_range(self) -> Self:
        check_numbers(self)
        return self

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return an instance with these options. Its text is what a user would type for them."""
        words = ",".join(f"{name}={value}" for name, value in options.items())
        return cls(text=f"{cls.kind}:{words}" if words else cls.kind, **options)

    def __str__(self) -> str:
        return self.text


Spec = TypeVar("Spec", bound=KindSpec)


def parse_kind(text: str, registry: Registry[type[Spec]], option: str) -> Spec:
    """Parse the text of an option, NAME or NAME:KEY=VALUE,...

    Args:
        registry: Registry of the kinds that NAME can name.
        option: Flag of the option, for errors.

    Raises:
        UserError: There is no such kind, the kind has no such KEY, or a value is out of range.
    """
    kind, _, rest = text.partition(":")
    where = f"{option} {text}"
    spec = registry.get(kind, where)
    pairs = [part.partition("=") for part in rest.split(",") if part]
    options: dict[str, Any] = {name: value for name, _, value in pairs}
    names = [name for name in spec.model_fields if name != "text"]
    if unknown := [name for name in options if name not in names]:
        raise UserError(f"{where}: {kind} has no option {unknown[0]!r}{did_you_mean(unknown[0], names)}")
    try:
        return spec(text=text, **options)
    except ValidationError as error:
        raise UserError(f"{where}: {validation_text(error)}") from None


def text_or_spec(parse: Callable[[str], KindSpec]) -> BeforeValidator:
    """Return a validator that parses text to a KindSpec, and leaves a value that is a KindSpec unchanged."""

    return BeforeValidator(lambda value: parsed(parse, value) if isinstance(value, str) else value)


def _modules(*package: str) -> dict[str, str]:
    """Return a dict from the name of each kind to the module that defines it. package: Path below draftlab."""
    found = pkgutil.iter_modules([str(Path(__file__).parent.parent.joinpath(*package))])
    names = [module.name for module in found]
    return {name.replace("_", "-"): ".".join(("draftlab", *package, name)) for name in names}


def split_at(separator: str) -> BeforeValidator:
    """Return a validator that splits text into a list, and leaves a value that is a list unchanged."""
    return BeforeValidator(lambda value: value.split(separator) if isinstance(value, str) else value)


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

    def build(self, context: Any) -> Any:
        """Return the drafter ready to draft, as a DrafterRun.

        context: A DrafterContext (engine/drafters/context.py).

        Raises:
            UserError: A file that the drafter needs is missing, or does not fit the target.
        """
        raise NotImplementedError

    def acceptance(self, replay: Any) -> Any:
        """Return the drafter's log-probability of each token of the completions: a TokenLogprobs for each text.

        For a completion of n tokens, the shape is [n]. If by_age is set, it is [n, K], where K is the largest number
        of drafted tokens per step, and each column is for one position in the draft. It is [n, K, K] if a draft of
        fewer tokens need not be the beginning of a longer draft.

        replay: A ReplayContext (target_outputs/replay.py).
        """
        raise NotImplementedError

    @classmethod
    def step_cost(cls, passes: Any, k: int, accepted: int) -> Any:
        """Return the milliseconds that a step takes to draft k tokens: an array with a value for each context length.

        Args:
            passes: A Passes (latency/steps.py), whose step() gives the time of drafting.
            accepted: Number of drafted tokens that the target accepted in the previous step.
        """
        raise NotImplementedError

    @classmethod
    def is_priced(cls) -> bool:
        """Return whether draftlab predict can time this drafter, that is, whether its class defines step_cost()."""
        return cls.step_cost.__func__ is not DrafterSpec.step_cost.__func__

    @classmethod
    def size_of(cls, folder: Path, target: Path) -> Any:
        """Return the size of a head as a Shape or an ApproximateSize (model/size.py).

        draftlab profile uses this size to choose the forward passes to time.

        Raises:
            UserError: The folder has no head for this target.
        """
        raise NotImplementedError

    @classmethod
    def passes_of(cls, folder: Path, target_path: Path, target: Any, mode: Mode) -> Any:
        """Load a head for its target, and return the forward passes to time as a HeadPasses.

        HeadPasses is in engine/drafters/states.py. folder, target_path: Directories of the head and of the target.
        target: The loaded target.
        """
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Return whether the drafter can be replayed, that is, whether its class defines acceptance()."""
        return type(self).acceptance is not DrafterSpec.acceptance


DrafterKind = TypeVar("DrafterKind", bound=type[DrafterSpec])
DRAFTERS: Registry[type[DrafterSpec]] = Registry("draftlab.drafters", "drafter", _modules("drafters"))


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
        spec.kind, spec.served_by = name, frozenset(served_by)
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


class StudentSpec(KindSpec):
    """The base class of students, the drafts that distill trains: one subclass for each kind.

    Attributes:
        starts_from_draft: Whether training starts from a checkpoint: --draft or the newest pruned draft. If False,
            --draft names a student to train further, and without --draft training starts from a new student.
        unused: Settings of distill that the student would ignore. distill refuses them.
        lr_share: Factor by which the default learning rate is multiplied. The default suits pruned drafts.
    """

    starts_from_draft: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset()
    lr_share: ClassVar[float] = 1.0

    def name(self, draft: Path, target: Path) -> str:
        """Return the name of the output directory.

        draft, target: Names that the user typed. draft is "." if the user typed no draft.
        """
        return f"{self.kind}-{hub.checkpoint_name(target)}"

    def check(self, job: Any) -> None:
        """Check that the student can be trained, without reading weights. job: A Distillation (training/run.py).

        Raises:
            UserError: The student does not fit the target or the text.
        """

    def facts(self, job: Any) -> Mapping[str, object]:
        """Return the facts that a dry run shows. job: A Distillation (training/run.py)."""
        raise NotImplementedError

    def open(self, job: Any, state: Path) -> Any:
        """Load or make the student, and return it as an OpenStudent (training/run.py), ready to be trained.

        Args:
            job: A Distillation (training/run.py).
            state: Directory of the unfinished run, in which the text that the target generates is stored.

        Raises:
            UserError: A checkpoint or text cannot be used.
        """
        raise NotImplementedError


StudentKind = TypeVar("StudentKind", bound=type[StudentSpec])
STUDENTS: Registry[type[StudentSpec]] = Registry("draftlab.students", "student", _modules("training", "students"))


def student(name: str) -> Callable[[StudentKind], StudentKind]:
    """Return a decorator that registers a class as a kind of student with this name.

    Raises:
        TypeError: The class does not define open() or facts().
        ValueError: Another kind has this name.
    """

    def decorate(spec: StudentKind) -> StudentKind:
        for method in ("open", "facts"):
            if getattr(spec, method) is getattr(StudentSpec, method):
                raise TypeError(f"{spec.__name__} has no method {method}()")
        spec.kind = name
        return STUDENTS.register(name)(spec)

    return decorate


def parse_student(text: str) -> StudentSpec:
    """Parse the text of --student. Raises UserError: there is no such student or option, or a value is wrong."""
    return parse_kind(text, STUDENTS, "--student")


Student = Annotated[StudentSpec, text_or_spec(parse_student), PlainSerializer(str)]
