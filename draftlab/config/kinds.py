"""Kinds with options as text: NAME or NAME:KEY=VALUE,... for drafters and students. No torch."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from typing_extensions import Self

from draftlab.errors import UserError, did_you_mean, plain_words
from draftlab.registry import Registry


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
