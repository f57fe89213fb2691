"""The base class of students, and their registry. No torch: a kind's own module is imported when the kind is used.

Each kind of student is one module, in draftlab/training/students, in a folder of draftlab/heads, or in a plug-in
(docs/distilling.md).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from pydantic import PlainSerializer

from draftlab.config.kinds import KindSpec, parse_kind, text_or_spec
from draftlab.model import hub
from draftlab.registry import Registry

if TYPE_CHECKING:  # needs torch
    from draftlab.training.run import Distillation, OpenStudent


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

    def check(self, job: "Distillation") -> None:
        """Check that the student can be trained, without reading weights.

        Raises:
            UserError: The student does not fit the target or the text.
        """

    def facts(self, job: "Distillation") -> Mapping[str, object]:
        """Return the facts that a dry run shows."""
        raise NotImplementedError

    def open(self, job: "Distillation", state: Path) -> "OpenStudent":
        """Load or make the student, and return it ready to be trained.

        state: Directory of the unfinished run, in which the text that the target generates is stored.

        Raises:
            UserError: A checkpoint or text cannot be used.
        """
        raise NotImplementedError


StudentKind = TypeVar("StudentKind", bound=type[StudentSpec])
STUDENTS: Registry[type[StudentSpec]] = Registry(
    "draftlab.students",
    "student",
    {
        "dflash": "draftlab.heads.dflash.student",
        "draft": "draftlab.training.students.draft",
        "eagle": "draftlab.heads.eagle3.student",
        "parallel": "draftlab.training.students.parallel",
    },
)


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
