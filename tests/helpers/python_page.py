"""docs/python.md, from the functions of the library: python -m helpers.python_page > docs/python.md"""

import dataclasses
import inspect
import re
import textwrap
from functools import cached_property
from types import UnionType
from typing import Any, get_args

import draftlab
from draftlab.commands import COMMANDS

HEAD = """# Python

Every command is a function of the library. Its arguments are the command's options, as keywords; `help(draftlab.prune)`
explains each, and so does [configuration](configuration.md). Paths may be strings or `Path` objects, and a list of one
item may be given as the item.

```python
import draftlab

draft = draftlab.prune(source="tiny", layers=3, width=128, data="stdlib", out="runs/cut")
draft = draftlab.distill(draft=draft.path, target="tiny", data="stdlib", steps=20, out="runs/draft")
score = draftlab.score(target="tiny", draft=[draft.path], data="stdlib", k="1-3", num_prompts=4, out="runs/score")
print(score.result.speedup, score.result.interval)
```

A function returns the command's outcome: `result` is what the library returned, `path` is what was written, `data` is
what `--json` prints, and `missed` lists bars that were set and not reached; printed, it shows what the command shows.
With `dry_run=True` a function returns the plan. Anything that the caller can fix raises `draftlab.UserError`.
`import draftlab` takes a few milliseconds: torch is imported when a function needs it.

`draftlab.Checkpoint.open(NAME)` reads a checkpoint, each part on first use: `config`, `shape`, `tensors()`
(a lazy mapping), `tokenizer`, `chat_template`, `eos_ids`, `vocab_size`, `max_model_len`, `dtype`, `head_ids`.

This page is generated (`make docs`).
"""


def page() -> str:
    names = [name for name in draftlab.__all__ if name not in ("Checkpoint", "UserError", "__version__")]
    return "\n".join([HEAD, *(section(name) for name in names)])


def section(name: str) -> str:
    function = getattr(draftlab, name)
    parameters = [shown(each) for each in inspect.signature(function).parameters.values()]
    call = textwrap.fill(", ".join(parameters), 120, initial_indent="    ", subsequent_indent="    ")
    lines = [
        f"## draftlab.{name}",
        "",
        " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()),
        "",
        "```",
        f"draftlab.{name}(",
        call,
        ")",
        "```",
        "",
    ]
    return "\n".join(lines + returned(name))


def shown(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}={parameter.default!r}"


def returned(name: str) -> list[str]:
    """Return which result of the library a function has, and the parts of it."""
    module = COMMANDS[name.replace("_", " ")].loaded()
    kind = next(iter(inspect.signature(module.show).parameters.values())).annotation
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return [f"`result` is {' or '.join(map(described, kinds))}.", ""]


def described(kind: Any) -> str:
    """Return a class and its parts. A type of several classes is shown without their modules."""
    if not isinstance(kind, type):
        return f"`{re.sub(r'[a-z_]+[.]', '', str(kind))}`"
    text = f"`{kind.__name__}`"
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        names += [name for name, value in vars(kind).items() if isinstance(value, property | cached_property)]
        text += f" with {', '.join(f'`{name}`' for name in names)}"
    return text


if __name__ == "__main__":
    print(page())
