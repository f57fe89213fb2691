"""docs/configuration.md, from the configs: python -m helpers.configuration_page > docs/configuration.md"""

from typing import Any, get_origin

from draftlab.commands import COMMANDS
from draftlab.commands.base import Command
from draftlab.config.base import extra
from draftlab.help import choices, limits, noun

HEAD = """# Configuration

Every command has one typed set of settings. Give them as options, in a file, or both: options win over the file.

```
draftlab distill --config distill.yaml --lr 0.002
draftlab distill --config runs/distill-3x256      # the settings that made an output
```

A file holds one `NAME: VALUE` per line. Every output directory holds its settings in `draftlab.json`. Recipes are lists
of commands with the same names: `draftlab run FILE.yaml`. Some recipes come with draftlab (`draftlab run quickstart`;
`draftlab run --help` lists them), as do shapes (`--shape tiny-4x192`), devices and tasks. Their names mean the same in
every folder, whatever files are there. Unknown names, values out of range and settings that do not go together are
errors, reported before anything is loaded.

`--help` shows the settings of the first table of each command, and `--help-all` those under "Advanced", too. A
number without an upper bound here is at most 1,000,000,000. This page is generated (`make docs`).
"""


def page() -> str:
    return "\n".join([HEAD, *map(section, COMMANDS.values())])


def section(command: Command) -> str:
    fields = command.config.model_fields.items()
    shown = [row(command, name, field) for name, field in fields if not extra(field)["advanced"]]
    hidden = [row(command, name, field) for name, field in fields if extra(field)["advanced"]]
    head = ["| setting | values | default | |", "|---|---|---|---|"]
    parts = [f"## draftlab {command.name}", "", command.help, ""]
    parts += [*head, *shown, ""] if shown else []
    parts += ["Advanced:", "", *head, *hidden, ""] if hidden else []
    return "\n".join(parts)


def row(command: Command, name: str, field: Any) -> str:
    flag = command.config.flag(name)
    spelled = f"`{name}`" if flag == "--" + name.replace("_", "-") else f"`{name}` (`{flag}`)"
    return (
        f"| {spelled} | {values(field)} | {default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |"
    )


def values(field: Any) -> str:
    if listed := choices(field):
        return ", ".join(f"`{value}`" for value in listed)
    bounds = limits(field)
    kind = extra(field)["typed"] or field.annotation
    return noun(field) + (" " + ", ".join(bounds) if bounds else "") + (", several" if get_origin(kind) is list else "")


def default(field: Any) -> str:
    shown = extra(field)["shown_default"]
    if shown:
        return shown
    if field.is_required():
        return "required"
    value = field.default
    if field.default_factory is not None or value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page())
