"""Registries of kinds by name, such as the drafters: draftlab's own kinds and the kinds of plug-ins. No torch."""

import contextlib
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from draftlab.errors import UserError, did_you_mean, one_line

Kind = TypeVar("Kind")
AnyKind = TypeVar("AnyKind")


class Registry(Generic[Kind]):
    """A registry of kinds (classes or functions) by name, such as the drafters or the losses.

    When a kind is first needed, its module is imported, and the module registers the kind. A plug-in declares an entry
    point in `group`. The name of the entry point is the name of the kind, and its value is the module.
    """

    def __init__(
        self,
        group: str,
        what: str,
        builtin: Mapping[str, str],
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make a registry.

        Args:
            group: Group of the entry points of plug-ins.
            what: Noun for a kind in errors, such as "drafter".
            builtin: Modules of draftlab's own kinds, by the name of the kind.
            elsewhere: Packages of further kinds, by the name of the kind. An error names the package if it is missing.
        """
        self.group = group
        self.what = what
        self.builtin = builtin
        self.elsewhere = elsewhere
        self.kinds: dict[str, Kind] = {}

    def register(self, name: str) -> Callable[[AnyKind], AnyKind]:
        """Return a decorator that registers a kind under this name. Raises ValueError: the name is taken."""

        def decorate(kind: AnyKind) -> AnyKind:
            if name in self.kinds:
                raise ValueError(f"a {self.what} with the name {name!r} exists already")
            kinds: dict[str, Any] = self.kinds
            kinds[name] = kind
            return kind

        return decorate

    @cached_property
    def plugins(self) -> dict[str, list[EntryPoint]]:
        """Return the entry points of installed plug-ins by name. Two packages may offer the same name."""
        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            found.setdefault(entry.name, []).append(entry)
        return found

    def names(self) -> list[str]:
        """Return the names of all kinds. No module is imported."""
        return list(dict.fromkeys([*self.builtin, *sorted(self.plugins), *self.kinds]))

    def listed(self, *first: str) -> str:
        """Return the names of all kinds as text for help, with the package of those that draftlab lacks.

        first: Names to begin with, which are not in the registry.
        """
        packages: dict[str, list[str]] = {}
        for name in sorted(self.plugins.keys() - self.builtin.keys()):
            packages.setdefault(_package(self.plugins[name][0]), []).append(name)
        text = ", ".join([*first, *self.builtin])
        if not packages:
            return text
        more = [f"{', '.join(names)} from {package}" for package, names in packages.items()]
        return f"{text} (and {'; '.join(more)})"

    def loadable(self) -> list[Kind]:
        """Import and return all kinds. Kinds of plug-ins that cannot be imported are left out."""
        kinds = []
        for name in self.names():
            with contextlib.suppress(UserError):
                kinds.append(self.get(name, self.what))
        return kinds

    def get(self, name: str, where: str) -> Kind:
        """Return the kind with this name. where: Start of an error message, such as "--rule x".

        Raises:
            UserError: There is no such kind, several packages offer it, or its package cannot be loaded.
        """
        offered = self.plugins.get(name, [])
        if len(offered) + (name in self.builtin) > 1:
            packages = [_package(entry) for entry in offered] + ["draftlab"] * (name in self.builtin)
            raise UserError(
                f"{where}: several packages offer the {self.what} {name!r}: {', '.join(packages)}; uninstall all "
                "but one"
            )
        if name not in self.kinds and name in self.builtin:
            import_module(self.builtin[name])
        elif name not in self.kinds and offered:
            self._load(offered[0], where)
        if name not in self.kinds and name in self.elsewhere:
            raise UserError(
                f"{where}: the {self.what} {name!r} is in the package {self.elsewhere[name]}, which is not installed; "
                "install it, or use another kind"
            )
        if name not in self.kinds:
            raise UserError(f"{where}: there is no {self.what} {name!r}{did_you_mean(name, self.names())}")
        return self.kinds[name]

    def _load(self, entry: EntryPoint, where: str) -> None:
        try:
            entry.load()
        except Exception as error:  # importing a plug-in may raise any exception
            raise UserError(
                f"{where}: the package {_package(entry)} cannot be loaded: {one_line(error)}; update or "
                "uninstall this package"
            ) from error
        if entry.name not in self.kinds:
            raise UserError(
                f"{where}: the package {_package(entry)} declares the {self.what} {entry.name!r} but does not register "
                "it; update or uninstall this package"
            )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


RULES: Registry[Any] = Registry(
    "draftlab.rules", "verify rule", dict.fromkeys(("match", "block"), "draftlab.engine.verify")
)
LOSSES: Registry[Any] = Registry(
    "draftlab.losses",
    "loss",
    dict.fromkeys(("fkl", "jsd", "lk", "nla", "rkl", "tvd"), "draftlab.training.losses"),
)
CROSS_ENTROPY = "ce"  # not in LOSSES, because this loss compares with the text, not with the target
REJECTION = "rejection"  # not in RULES, because the engine applies this rule to all rows at once
SERVERS: Registry[Any] = Registry(
    "draftlab.servers",
    "server",
    {
        name: f"draftlab.servers.{name.replace('.', '_').replace('-', '_')}"
        for name in ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers")
    },
)
