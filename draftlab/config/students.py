"""Students as an option: NAME or NAME:KEY=VALUE,... (docs/distilling.md), and what every kind of student has. No torch.

The kinds are in draftlab/training/students, a module each, and in plug-ins.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import PlainSerializer

from draftlab.config.kinds import KindSpec, parse_kind, text_or_spec
from draftlab.model import hub
from draftlab.registry import Registry

PACKAGE = "draftlab.training.students"


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
        """Check that a Distillation (training/distill.py) can be run; weights are not read.

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


Spec = TypeVar("Spec", bound=type[StudentSpec])
STUDENTS: Registry[type[StudentSpec]] = Registry(
    "draftlab.students",
    "student",
    {name: f"{PACKAGE}.{name}" for name in ("draft", "parallel", "eagle")},
)


def student(name: str) -> Callable[[Spec], Spec]:
    """Return a decorator that registers a kind of student.

    Raises:
        TypeError: the class does not define open() and facts().
    """

    def decorate(spec: Spec) -> Spec:
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
