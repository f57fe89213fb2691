"""Kinds with options, which a user types as NAME or NAME:KEY=VALUE,... No torch.

The base classes of the kinds derive from KindSpec: DrafterSpec in drafters/base.py, and StudentSpec in
training/students/base.py.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from draftlab.config.base import check_numbers, parsed
from draftlab.errors import UserError, did_you_mean
from draftlab.reading import validation_text
from draftlab.registry import Registry


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


def split_at(separator: str) -> BeforeValidator:
    """Return a validator that splits text into a list, and leaves a value that is a list unchanged."""
    return BeforeValidator(lambda value: value.split(separator) if isinstance(value, str) else value)
