"""Config, the base class of a command's settings: options with help and bounds, rules between options, and files."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftlab.console import note
from draftlab.errors import UsageError, UserError, did_you_mean, one_line, plain_words
from draftlab.model.shape import parse_numbers
from draftlab.reading import read_yaml
from draftlab.runs import workspace
from draftlab.runs.provenance import RECORD_FILE, read_record
from draftlab.shell import typed
from draftlab.trust import printable, without_secrets

# panels of --help
OUTPUT = "Output"
SERVER = "Server"
TRAINING = "Training"
CHECKPOINTS = "Evaluation and checkpoints"
Value = TypeVar("Value")
# text: a data mixture; tasks: lm-eval's tasks; shape: a shape file or its name; path: a text that may be a path;
# nothing: a Path that is not read
Reads = Literal["text", "tasks", "shape", "path", "nothing"]
# always: the setting runs a program, reaches another machine, reads a secret or names a place to write; path: it does
# so if it names a file, such as a task file with code
Acts = Literal["always", "path"]
TRUST = "trust_remote_code"
# largest K (drafted tokens per step) that options accept; the cost of tables and loops grows with K
MAX_K = 1_000
LARGEST = 10**9  # largest absolute value of a number whose option has no bound of its own


def option(
    default: object = PydanticUndefined,
    help: str = "",
    *,
    factory: Callable[[], Any] | Callable[[dict[str, Any]], Any] | None = None,
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    flag: str | None = None,
    panel: str | None = None,
    advanced: bool = False,
    argument: bool = False,
    shown_default: str | None = None,
    typed: object = None,
    reads: Reads | None = None,
    acts: Acts | None = None,
) -> Any:
    """Return a field of a config that is also an option of its command.

    Args:
        default: Default value. Without a default the option is required.
        factory: Function that computes the default when a config is built. It takes no argument, or a dict with the
            values of the fields that are declared above this field.
        flag: Spelling of the option if it differs from the field's name.
        panel: Heading under which --help lists the option.
        advanced: Whether to hide the option in --help. docs/configuration.md lists it in any case.
        argument: Whether the option is a positional argument.
        shown_default: Text that --help shows in place of the default.
        typed: Type on the command line if it differs from the field's type.
        reads: What the command reads by this setting, so that the contents decide whether a run is the same
            (inputs.py). By default, a Path is a file or directory that is read, and any other value is none.
        acts: Whether the setting must be typed, so that the record of a run cannot decide it (see of_file).
    """
    extra = {
        "flag": flag,
        "panel": panel,
        "advanced": advanced,
        "argument": argument,
        "shown_default": shown_default,
        "typed": typed,
        "reads": reads,
        "acts": acts,
    }
    given: dict[str, Any] = {"default_factory": factory} if factory else {"default": default}
    return Field(
        **given,
        description=help,
        ge=ge,
        le=le,
        gt=gt,
        json_schema_extra=extra,
        validate_default=typed is not None,
    )


advanced_option = partial(option, advanced=True)


def from_workspace(name: str, help: str, **others: Any) -> Any:
    """Return an option whose default is the value of this name in the workspace file, draftlab.yaml."""
    return option(
        factory=lambda: getattr(workspace.load(), name),
        help=help,
        shown_default="from draftlab.yaml",
        **others,
    )


NO_DEFAULT = ("target", "source", "data")  # settings that the user or draftlab.yaml must name


def parsed(parse: Callable[[str], Value], value: str) -> Value:
    """Parse the value of a setting.

    Raises:
        ValueError: `parse` raised UserError. pydantic reports only a ValueError with the name of the setting.
    """
    try:
        return parse(value)
    except UserError as error:
        raise ValueError(str(error)) from None


def _numbers(value: object) -> list[int]:
    """Return the numbers in the text of an option, such as 1-6, or in a list of a settings file. They are ascending."""
    return parsed(parse_numbers, ",".join(map(str, value)) if isinstance(value, list) else str(value))


def _at_most_max_k(ks: list[int]) -> list[int]:
    if ks[-1] > MAX_K:
        raise ValueError(f"a step drafts at most {MAX_K:,} tokens; use smaller numbers")
    return ks


Numbers = Annotated[list[int], BeforeValidator(_numbers)]  # ascending; written 1-6 or 2,4,8
DraftedTokens = Annotated[Numbers, AfterValidator(_at_most_max_k)]


def numbers(default: str, help: str, **others: Any) -> Any:
    """Return an option for a field of type Numbers."""
    return option(default, help, typed=str, **others)


@dataclass(frozen=True, slots=True)
class Only:
    """A rule by which a command does not use some options unless its config meets a condition.

    Attributes:
        options: Names of the settings. The rule acts only on those that are set (see Config.is_set).
        when: Function that takes the config, and returns whether the command uses the options.
        reason: Text that follows "--x: " in the error, or "--x: no effect; " in the note.
        refused: Whether to refuse the options then, because to go on without them would cost hours or falsify a result.
            Otherwise a note names them, and the command goes on as if they were not set.
    """

    options: Sequence[str]
    when: Callable[[Any], object]
    reason: str
    refused: bool = True


def check_numbers(options: BaseModel) -> None:
    """Check that no number is above LARGEST, unless its field has a bound of its own.

    Raises:
        ValueError: A number is larger. pydantic reports it.
    """
    for name, field in type(options).model_fields.items():
        value = options.__dict__[name]
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if not isinstance(number, int | float) or bound(field, "le") is not None:
                continue
            if abs(number) > LARGEST:
                flag = type(options).flag(name) if isinstance(options, Config) else name
                raise ValueError(f"{flag} {one_line(number, 80)}: must be at most {LARGEST:,}")


class Config(BaseModel):
    """Settings of one command."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    only: ClassVar[Sequence[Only]] = ()
    _without_effect: list[str] = PrivateAttr(default_factory=list)

    @property
    def text_source(self) -> str | None:
        """Return the text of --data if the command will read it. It is checked before anything is loaded."""
        return None

    @property
    def addresses(self) -> dict[str, str | None]:
        """Return the addresses of running servers by option. They are contacted before anything is loaded."""
        return {}

    @classmethod
    def build(cls, settings: dict[str, Any], where: str = "") -> Self:
        """Return the config with these settings, and with defaults for all other settings.

        where: Start of an error message, such as "--config x.yaml: ".

        Raises:
            UsageError: A required setting is missing, or neither `settings` nor draftlab.yaml names a model or text.
            UserError: A setting is unknown, out of bounds, not UTF-8, or excluded by another setting.
        """
        if unknown := sorted(set(settings) - set(cls.model_fields)):
            name = one_line(unknown[0], 80)
            raise UserError(f"{where}unknown key {name!r}{did_you_mean(name, cls.model_fields)}")
        try:
            json.dumps(settings, default=str, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}a setting is not UTF-8 text: {printable(error.object[:200])}") from None
        try:
            config = cls._of_used(settings)
            config._check_named()
            return config
        except ValidationError as error:
            items = [dict(item) for item in error.errors() if item["type"] != "default_factory_not_called"]
            missing = any(item["type"] == "missing" for item in items)
            text = "; ".join(map(cls._complaint, items))
            raise (UsageError if missing else UserError)(where + text) from None
        except UserError as error:  # also from a property that a rule in `only` reads
            error.args = (f"{where}{error}",)
            raise

    @classmethod
    def _of_used(cls, settings: dict[str, Any]) -> Self:
        """Return the config of the settings that have an effect. It keeps a note about each group of others."""
        config = cls(**settings)
        notes: list[str] = []
        while breaches := list(config._breaches(refused=False)):
            idle = {name for names, _ in breaches for name in names}
            notes += [cls._no_effect(names, reason) for names, reason in breaches]
            settings = {name: value for name, value in settings.items() if name not in idle}
            config = cls(**settings)
        config._without_effect = notes
        return config

    def _breaches(self, *, refused: bool) -> Iterator[tuple[list[str], str]]:
        """Yield for each rule of this kind that the config does not meet: the settings that are set, and the reason."""
        for rule in self.only:
            if rule.refused != refused or rule.when(self):
                continue
            if idle := [name for name in rule.options if self.is_set(name)]:
                yield idle, rule.reason

    def note_unused(self) -> None:
        """Print a line for each group of options that the user gave although they have no effect in this mode."""
        for text in self._without_effect:
            note(text)

    def note_if_given(self, *names: str, reason: str) -> None:
        """Print a line about those of the options that the user gave, but that have no effect on these inputs."""
        if given := [name for name in names if self.is_set(name)]:
            note(self._no_effect(given, reason))

    @classmethod
    def _no_effect(cls, names: Iterable[str], reason: str) -> str:
        return f"{cls._flags(names)}: no effect; {reason}"

    @property
    def _unnamed(self) -> list[str]:
        """Return the settings that name a model or text, but have no name."""
        # not getattr: see is_set
        return [name for name in NO_DEFAULT if self.__dict__.get(name) == ""]

    def _check_named(self) -> None:
        """Check that every model and text that the command reads has a name.

        Raises:
            UsageError: Neither the user nor draftlab.yaml names it.
        """
        unread = self.unused() | ({"data"} if self.text_source is None else set[str]())
        for name in self._unnamed:
            if name in unread:
                continue
            lacks = "does not name it" if workspace.FILE.exists() else "is not in this folder"
            raise UsageError(
                f"{self.flag(name)} is required, because {workspace.FILE} {lacks}: type {self.flag(name)} NAME, or "
                "first draftlab init --preset tiny"
            )

    @classmethod
    def of_file(cls, path: Path, command: str, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in a YAML file, or those that an output directory records, with typed settings over them.

        trust_remote_code is left out of recorded settings. A record may be a stranger's: it repeats numbers and names
        of data, but does not run a program, reach a server, read a secret or choose a place to write.

        Args:
            path: The YAML file, the output directory, or the record file in this directory.
            command: Name of the command, such as "outputs build".
            typed: Settings of the command line.

        Raises:
            UserError: The file is not a mapping of names to values, or the directory is not an output of this command.
                Or its record has a setting that acts (see option) and that is not typed.
        """
        if path.is_dir() or path.name == RECORD_FILE:
            record = read_record(path if path.is_dir() else path.parent)
            if record is None or record.command != command:
                raise UserError(
                    f"--config {path}: this directory is not an output of draftlab {command}; name an output of this "
                    "command, or a YAML file of its settings"
                )
            recorded = {name: value for name, value in record.config.items() if name != TRUST}
            cls._check_record(recorded, typed, path, command)
            return recorded | dict(typed)
        settings = read_yaml(path, f"--config {path}")
        if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
            raise UserError(
                f"--config {path}: the file must hold settings of draftlab {command}, one NAME: VALUE per line"
            )
        return settings | dict(typed)

    @classmethod
    def _check_record(cls, recorded: Mapping[str, Any], typed: Mapping[str, Any], path: Path, command: str) -> None:
        """Check that a record leaves the settings that act to the user. Raises UserError: it does not."""
        known = recorded.keys() & cls.model_fields.keys() - typed.keys()
        acting = sorted(name for name in known if _acts(cls.model_fields[name], recorded[name]))
        if acting:
            config = cls.build({**recorded, **typed}, f"--config {path}: ")
            raise UserError(
                f"--config {path}: a record does not decide {cls._flags(acting)}; give other values, or "
                f"type the whole command if you trust it: {config.command_line(command)}"
            )

    @model_validator(mode="after")
    def _numbers_in_range(self) -> Self:
        check_numbers(self)
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for idle, reason in self._breaches(refused=True):
            raise ValueError(f"{self._flags(idle)}: {reason}")
        return self

    def is_set(self, name: str) -> bool:
        """Return whether the user gave a setting, and its value differs from its default.

        A setting whose default is computed counts as set whenever the user gave it.
        """
        field = type(self).model_fields[name]
        if name not in self.model_fields_set or field.default_factory is not None:
            return name in self.model_fields_set
        value = self.__dict__[name]  # not getattr: a test traces which settings a command reads
        if isinstance(field.default, str) and isinstance(value, list):
            return value != _numbers(field.default)
        return value != field.default and str(value) != field.default

    def resolved(self) -> Self:
        """Return the config with values for inputs that the user left out: the newest outputs in the workspace.

        Raises:
            UserError: The workspace has no output that the command can read.
        """
        return self

    def settings(self) -> dict[str, Any]:
        """Return the settings that the command uses, as JSON values, to record them or to compare runs.

        Settings that a rule in `only` excludes are left out, and models and text without a name, which the command does
        not read. trust_remote_code is left out, too, because the user must give it to each run. Passwords in addresses
        are removed.
        """
        settings = json.loads(self.model_dump_json(exclude=self.unused() | {*self._unnamed, TRUST}))
        return {name: without_secrets(v) if isinstance(v, str) else v for name, v in settings.items()}

    def unused(self) -> set[str]:
        """Return the names of the settings that the command does not use, according to the rules in `only`."""
        return {name for rule in self.only if not rule.when(self) for name in rule.options}

    @classmethod
    def flag(cls, name: str) -> str:
        """Return how --help spells a setting: the flag of an option, or a positional argument's name in capitals."""
        details = extra(cls.model_fields[name])
        return name.upper() if details["argument"] else details["flag"] or "--" + name.replace("_", "-")

    @classmethod
    def _flags(cls, names: Iterable[str]) -> str:
        return ", ".join(map(cls.flag, names))

    def repeated(self, *names: str) -> list[object]:
        """Return flags and values of the settings of these names that the user gave, for a following command."""
        words: list[object] = []
        for name in names:
            if self.is_set(name):
                words += [self.flag(name), getattr(self, name)]
        return words

    def command_line(self, command: str) -> str:
        """Return a command line that builds this config. It leaves out settings with default values, and passwords."""
        words = ["draftlab", *command.split()]
        arguments = []
        for name, field in type(self).model_fields.items():
            value = self.__dict__[name]
            if not self.is_set(name):
                continue
            if extra(field)["typed"] is str:
                value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for item in value if isinstance(value, list | tuple) else [value]:
                item = without_secrets(item) if isinstance(item, str) else item
                if extra(field)["argument"]:
                    arguments.append(Path(item))  # a name on the hub is unchanged
                elif isinstance(item, bool):
                    words.append(self.flag(name) if item else "--no-" + name.replace("_", "-"))
                else:
                    words += [self.flag(name), str(item)]
        return typed(*words, *arguments)

    @classmethod
    def _complaint(cls, item: dict[str, Any]) -> str:
        """Return pydantic's error about a setting in draftlab's wording, with the flag and the value of the setting."""
        message = plain_words(str(item["msg"]))
        if not item["loc"] or item["loc"][0] not in cls.model_fields:
            return message
        flag = cls.flag(str(item["loc"][0]))
        if item["type"] == "missing":
            return f"{flag} is required"
        return message if message.startswith(flag) else f"{flag} {one_line(item['input'], 80)}: {message}"


class OutputConfig(Config):
    """The settings of a command that writes a directory."""

    out: Path | None = option(
        None,
        "Directory to write. Default: a directory in runs/ (see runs in draftlab.yaml).",
        panel=OUTPUT,
        reads="nothing",
        acts="always",
    )


def _acts(field: FieldInfo, value: object) -> bool:
    """Return whether a recorded value acts (see option). A setting that was not used has null, false or nothing."""
    acts = extra(field)["acts"]
    if acts is None or value in (None, False, "", []):
        return False
    names = str(value).split(",")
    return acts == "always" or any("/" in name or Path(name).suffix or Path(name).exists() for name in names)


def bound(field: FieldInfo, kind: Literal["ge", "gt", "le"]) -> float | None:
    """Return the minimum (ge), exclusive minimum (gt) or maximum (le) of a setting, or None if it has no such bound."""
    return next((getattr(part, kind) for part in field.metadata if hasattr(part, kind)), None)


def extra(field: FieldInfo) -> dict[str, Any]:
    """Return the details of an option for which pydantic has no field, such as flag and panel (see option())."""
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)
