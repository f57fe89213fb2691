"""Small stores of target outputs."""

from pathlib import Path
from typing import Any

import pytest

from draftlab.commands import OUTPUTS_BUILD
from draftlab.commands.base import Outcome
from helpers.small_files import write_functions


@pytest.fixture(scope="module", name="text")
def text_fixture(tmp_path_factory) -> str:
    return write_functions(tmp_path_factory.mktemp("text") / "text.txt", 200, 8)


def build_store(target: Path, data: str, out: Path, **changes: Any) -> Outcome:
    """Outputs to distil from: of 20 sequences of 16 tokens, 8 listed at each place."""
    sizes: dict[str, Any] = {"num_sequences": 20, "seq_len": 16, "top_logprobs": 8}
    sizes |= {"prompt_tokens": 4} if changes.get("text") == "target" else {}
    return OUTPUTS_BUILD(**{"target": str(target), "data": data, "out": out} | sizes | changes)
