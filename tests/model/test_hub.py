"""Hub names, through huggingface_hub itself and a hub on this machine: what is fetched, what is said if it cannot."""

import socket
import time
from pathlib import Path

import pytest
from helpers.errors import raises_option
from helpers.hub_server import Hub, cache_fixture, point_at, served_fixture  # noqa: F401
from helpers.published_heads import written
from helpers.sharded import SHARDS
from helpers.small_files import write_prompts
from huggingface_hub import constants
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.runs import workspace

PLAIN = [
    f"{name}.json"
    for name in [
        "config",
        "generation_config",
        "model.safetensors.index",
        "tokenizer",
        "tokenizer_config",
    ]
]


def files(served: Hub) -> list[str]:
    return sorted(name.removeprefix("lab/sharded/") for name in served.fetched)


def test_without_weights_configuration_and_tokenizer_alone_are_fetched(served, cache, family_dirs):
    place = hub.locate("lab/sharded", weights=False)
    assert files(served) == PLAIN
    assert checkpoint.read_shape(place) == checkpoint.read_shape(family_dirs["llama"])
    assert checkpoint.eos_token_ids(place) == (1,)


def test_of_the_weights_only_what_the_index_names_is_fetched(served, cache, family_dirs):
    place = hub.locate("lab/sharded")
    assert files(served) == sorted([*PLAIN, *SHARDS])
    assert checkpoint.read_shape(place) == checkpoint.read_shape(family_dirs["llama"])


def test_what_was_fetched_is_not_fetched_again_and_serves_offline(served, cache, monkeypatch, capsys):
    place = hub.locate("lab/sharded")
    announced = capsys.readouterr().err
    assert "lab/sharded" in announced
    assert constants.HF_HUB_CACHE in announced
    served.fetched.clear()
    assert hub.locate("lab/sharded") == place
    assert constants.HF_HUB_CACHE not in capsys.readouterr().err
    assert files(served) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.locate("lab/sharded") == place


def test_half_of_a_checkpoint_offline_is_not_taken_for_all(served, cache, monkeypatch):
    hub.locate("lab/sharded", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises_option("HF_HUB_OFFLINE"):
        hub.locate("lab/sharded")


def test_a_revision_is_named_behind_an_at_sign(served, cache):
    place = hub.locate("lab/sharded@v0.1")
    assert (place / "model.safetensors").is_file()
    assert place != hub.locate("lab/sharded", weights=False)
    assert hub.locate(f"lab/sharded@{place.name}") == place  # by its commit


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lab/sharded@v9", "RevisionNotFound"),
        ("lab/nosuch", "RepositoryNotFound"),
        ("lab/gated", "lab/gated.*hf auth login"),
        ("lab/gguf", "draftlab import"),
        ("lab/na--me", "HFValidationError"),
    ],
)
def test_what_cannot_be_had_says_why_and_what_to_type(served, cache, name, words):
    with pytest.raises(UserError, match=words) as caught:
        hub.locate(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        "prune --source NAME --layers 2 --seq-len 64 --dry-run",
        "distill --draft NAME --target NAME --dry-run",
        "outputs build --use replay --target NAME --prompt-file prompts.jsonl --dry-run",
        "score --draft NAME --target NAME --prompt-file prompts.jsonl --dry-run",
        "profile --law NAME --dry-run",
        "search --source NAME --target NAME --layers 1 --dry-run",
        "design --source NAME --params 100k",
        "check DRAFT --target NAME --files-only --for transformers",
    ],
)
def test_plans_and_checks_fetch_no_weights(served, cache, command, family_dirs, monkeypatch):
    monkeypatch.chdir(cache)
    workspace.write(workspace.Workspace(target="lab/sharded", source="lab/sharded", data="stdlib"))
    Path("prompts.jsonl").write_text('{"prompt": "def parse(line):"}\n' * 16)
    typed = command.replace("NAME", "lab/sharded").replace("DRAFT", str(family_dirs["llama"]))
    result = CliRunner().invoke(app, typed.split())
    assert result.exit_code == 0, result.output
    assert files(served) == PLAIN


def test_a_check_of_a_head_fetches_the_weights_of_its_target(served, cache, family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = written(tmp_path / "head", family_dirs["llama"])
    write_prompts(Path("prompts.jsonl"), 2)
    typed = f"check {head} --target lab/sharded --prompt-file prompts.jsonl"
    result = CliRunner().invoke(app, typed.split())
    assert "acceptance" in result.output, result.output
    assert files(served) == sorted([*PLAIN, *SHARDS])


def refusing_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_an_unreachable_hub_is_said_within_five_seconds(tmp_path, monkeypatch):
    """A port that nobody listens on, and one that takes connections and never answers."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        for url in (refusing_url(), f"http://127.0.0.1:{mute.getsockname()[1]}"):
            point_at(url, tmp_path, monkeypatch)
            start = time.monotonic()
            with raises_option("--preset"):
                hub.locate("lab/sharded")
            with raises_option("hf:lab/text"):
                hub.check_data("stdlib=0.5,hf:lab/text=0.5")
            assert time.monotonic() - start < 5
    assert hub.check_data("stdlib") == "stdlib"  # the hub is not asked
