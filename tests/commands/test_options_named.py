"""Every option that a message, a help text or a script of draftlab names is an option."""

import ast
import re
from pathlib import Path

import draftlab
from draftlab.commands import COMMANDS

PACKAGE = Path(draftlab.__file__).parent
COMMON = {
    "--help",
    "--help-all",
    "--config",
    "--json",
    "--dry-run",
    "--force",
    "--version",
    "--install-completion",
}
OTHERS = {  # options of programs that draftlab starts or names
    "pip": {"--no-deps", "--upgrade"},
    "git": {"--short"},
    "CSS": {"--soft"},
    "llama-gguf-split": {"--merge"},
    "uvicorn": {"--host", "--port"},
    "vllm": {
        "--enforce-eager",
        "--logprobs-mode",
        "--no-enable-prefix-caching",
        "--speculative-config",
        "--tensor-parallel-size",
    },
    "sglang": {
        "--attention-backend",
        "--enable-deterministic-inference",
        "--model-path",
        "--speculative-adaptive",
        "--speculative-adaptive-config",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-draft-window-size",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-num-steps",
    },
    "llama-server": {
        "--draft-max",
        "--draft-min",
        "--draft-p-min",
        "--metrics",
        "--model",
        "--model-draft",
        "--spec-draft-model",
        "--spec-draft-n-max",
        "--spec-draft-sampling",
        "--spec-ngram-simple-size-m",
        "--spec-ngram-simple-size-n",
        "--spec-type",
    },
    "trtllm-serve": {"--extra"},
}


def known() -> set[str]:
    commands = COMMANDS.values()
    ours = {each.config.flag(name) for each in commands for name in each.config.model_fields}
    return ours | COMMON | set().union(*OTHERS.values())


def named(text: str) -> set[str]:
    """Return the options in the strings of a module."""
    nodes = ast.walk(ast.parse(text))
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = (re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", each) for each in strings)
    return {option for options in found for option in options if option != "--no"}


def test_every_option_that_is_named_exists():
    files = sorted(PACKAGE.rglob("*.py"))
    unknown = {file.name: named(file.read_text()) - known() for file in files}
    assert {name: options for name, options in unknown.items() if options} == {}
