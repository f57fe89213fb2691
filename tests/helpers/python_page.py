"""docs/python.md, from the functions of the library: python -m helpers.python_page > docs/python.md"""

import dataclasses
import inspect
import textwrap
from typing import get_args

import draftlab
from draftlab.commands.base import Outcome

HEAD = """# Python

Every command is a function of the library. Its arguments are the command's options, as keywords; `help(draftlab.prune)`
explains each, and so does [configuration](configuration.md). Paths may be strings or `Path` objects, and a list of one
item may be given as the item.

```python
import draftlab

draft = draftlab.prune(source="tiny", layers=3, width=128, data="stdlib", out="runs/cut")
draft = draftlab.distill(draft=draft.path, target="tiny", data="stdlib", steps=20, out="runs/draft")
score = draftlab.score(target="tiny", draft=[draft.path], data="stdlib", k="1-3", num_prompts=4, out="runs/score")
print(score.speedup, score.interval)
```

A function returns what its command found. Every result has `path` (what was written), `data` (what `--json` prints) and
`missed` (bars that were set and not reached); printed, it shows what the command shows. With `dry_run=True` a function
returns the plan. Anything that the caller can fix raises `draftlab.UserError`. `import draftlab` takes a few
milliseconds: torch is imported when a function needs it.

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
    result = next(iter(get_args(returns := inspect.signature(function).return_annotation)), returns)
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
    return "\n".join(lines + returned(result))


def shown(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}={parameter.default!r}"


def returned(result: type[Outcome]) -> list[str]:
    """Return what a result has besides the attributes of every result."""
    common = {field.name for field in dataclasses.fields(Outcome)}
    names = [field.name for field in dataclasses.fields(result) if field.name not in common]
    names += [name for name, value in vars(result).items() if isinstance(value, property)]
    if not names:
        return []
    text = " ".join((result.__doc__ or "").split())
    return [
        f"Returns `{result.__name__}` with {', '.join(f'`{name}`' for name in names)}. {text}",
        "",
    ]


if __name__ == "__main__":
    print(page())
