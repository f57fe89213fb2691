"""Files that commands read in tests: text, rows of JSON, prompts, changed settings, a workspace."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from draftlab.runs import workspace

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_functions(file: Path, count: int = 80, repeats: int = 20) -> str:
    """Write a text of documents, a function repeated in each, with a blank line between them."""
    texts = (f"def f{i}(line):\n    return [line, {i}]\n" * repeats for i in range(count))
    file.write_text("\n\n".join(texts))
    return str(file)


def write_rows(file: Path, rows: Iterable[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_prompts(file: Path, count: int) -> Path:
    return write_rows(file, ({"prompt": f"def f{i}(x):"} for i in range(count)))


def edit(file: Path, **changes: object) -> None:
    """Change settings of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def copy_tokenizer(source: Path, out: Path) -> None:
    for file in source.glob("tokenizer*"):
        shutil.copy(file, out)


def with_template(source: Path, out: Path, text: str = TEMPLATE) -> Path:
    """Copy a model, and give it a chat template."""
    shutil.copytree(source, out)
    (out / "chat_template.jinja").write_text(text)
    return out


def write_workspace(target: Path, data: str = "stdlib", folder: Path = Path()) -> None:
    """Write a workspace whose target is its source, too."""
    name = str(target)
    workspace.write(workspace.Workspace(target=name, source=name, data=data), folder)
