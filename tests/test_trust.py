"""Trust: what folders and servers say is no code, leads nowhere, and shows itself as it is."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.builders import build
from helpers.errors import raises_option

from draftlab.commands import COMMANDS
from draftlab.commands.settings.distill import DistillConfig
from draftlab.commands.settings.score import ScoreConfig
from draftlab.config.base import extra
from draftlab.data.text import chat_text
from draftlab.errors import UserError
from draftlab.exporting import card
from draftlab.model import checkpoint, native_cpu, saving
from draftlab.registry import SERVERS
from draftlab.runs import provenance, workspace
from draftlab.servers.kinds import Launch
from draftlab.target_outputs.store import Manifest
from draftlab.trust import (
    check_address,
    checked_name,
    folder_name,
    printable,
    remote_code,
    trusts_remote_code,
    without_secrets,
)

HOSTILE = "0.32\ntouch X #\x1b]0;owned\x07"


@pytest.mark.parametrize("name", ["", "\x1b[2J", "‮gpj", "a" * 201, None])
def test_names_with_other_meanings_are_refused(name):
    with pytest.raises(UserError):
        checked_name(name, "its version")


@pytest.mark.parametrize(("name", "folder"), [("meta/Llama-3", "Llama-3"), ("a\\b", "b"), ("x/", "x"), ("/m/q/", "q")])
def test_a_server_names_one_folder(name, folder):
    assert folder_name(name, "the model") == folder


@pytest.mark.parametrize("name", ["a/..", "/"])
def test_no_name_leads_out_of_its_folder(name):
    with pytest.raises(UserError):
        folder_name(name, "the model")


def test_a_manifest_cannot_lead_out_of_its_store():
    field = Manifest.model_fields["target"]
    with pytest.raises(UserError):
        field.metadata[0].func("..")


@pytest.mark.parametrize(
    "address",
    [
        "http://user:SECRET@host:8000/v1",
        "https://host/x?token=SECRET",
        "http://host#SECRET",
        "HTTP://user:SECRET@host",
        "hTTps://user:SECRET@host",
        " http://user:SECRET@host",
        "\thttp://user:SECRET@host",
        "http:/user:SECRET@host",
        "http:\\\\user:SECRET@host",
        "socks5h://user:SECRET@host:1080",
        "http://user:SEC@RET:SECRET@host",
    ],
)
def test_secrets_stay_out_of_what_is_written(address):
    servers = {"server": address, "speculative_server": address}
    config = ScoreConfig.build({**servers, "target": "tiny", "data": "stdlib"})
    written = json.dumps(config.settings()) + config.command_line("score") + without_secrets(address)
    assert "SECRET" not in written
    assert "user" not in written
    assert "host" in written


@pytest.mark.parametrize("rest", ["127.0.0.1:abc", "[::1", "host:1/\x1b[2J", "host:1 "])
def test_an_address_with_a_typing_error_is_one_line(rest):
    with raises_option("HOST:PORT") as refused:
        check_address(f"http://{rest}")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("sign", ["/", "#"])
def test_no_part_of_a_password_is_printed(sign):
    address = f"http://user:SEC{sign}RET@host:8000"
    with pytest.raises(UserError) as refused:
        check_address(address)
    shown = str(refused.value) + without_secrets(address)
    assert not any(part in shown for part in ("user", "SEC", "RET"))
    check_address("http://user:SEC%2FRET@host:8000")


def test_scripts_have_no_line_that_others_wrote():
    for runtime in ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers"):
        server, reason = SERVERS.get(runtime, "--to"), f"measured with vllm {HOSTILE}"
        _, text = server.script(Launch(target="a\nid #", k=3, reason=reason, file="x.gguf"))
        _, plain = server.script(Launch(target="a id", k=3, reason="measured", file="x.gguf"))
        assert len(text.splitlines()) == len(plain.splitlines())
        assert printable(text.replace("\n", "")) == text.replace("\n", "")


def test_a_card_is_yaml_of_two_keys_whatever_the_target_is_called():
    facts = card.Card(
        name=f"draft {HOSTILE}",
        target="a: b\nlicense: mit",
        kind="draft model",
        summary="1M",
        commands=[HOSTILE],
        heldout=None,
        scores=[],
        script=("serve.sh", "one\ntwo"),
        verified="",
    )
    text = facts.text()
    _, head, body = text.split("---\n", 2)
    assert set(yaml.safe_load(head)) == {"base_model", "tags"}
    assert "\x1b" not in text
    assert "one\ntwo" in body


def remote_checkpoint(folder: Path, tokenizer_dir: Path) -> Path:
    """Return a checkpoint whose configuration names code beside it, which leaves a file."""
    build("llama").save_pretrained(folder)
    for file in tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": auto_map}))
    (folder / "code.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    return folder


def test_code_of_a_checkpoint_runs_only_where_it_is_trusted(tmp_path, tokenizer_dir, monkeypatch):
    folder = remote_checkpoint(tmp_path / "own", tokenizer_dir)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own = str(folder)
    settings: dict[str, dict[str, Any]] = {
        "check": {"draft": own, "target": own},
        "prune": {"source": own, "layers": 2, "out": tmp_path / "out"},
        "distill": {"draft": own, "target": own, "out": tmp_path / "out"},
        "score": {"draft": [own], "target": own, "out": tmp_path / "out"},
    }
    for command, given in settings.items():
        with pytest.raises(UserError):
            COMMANDS[command](**given)
    assert not (folder / "ran").exists()


def test_prune_runs_the_code_of_a_tokenizer_only_where_it_is_trusted(tmp_path, tokenizer_dir):
    """XGen, for example, has LLaMA's tensors and a tokenizer of its own."""
    folder = remote_checkpoint(tmp_path / "own", tokenizer_dir)
    build("llama").save_pretrained(folder)
    (folder / "code.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "Tokenizer",
        "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    cut = {
        "source": str(folder),
        "layers": 2,
        "data": "stdlib",
        "calibration_tokens": 64,
        "seq_len": 32,
    }
    with pytest.raises(UserError):
        COMMANDS["prune"](**cut, out=tmp_path / "out")
    assert not (folder / "ran").exists()
    COMMANDS["prune"](**cut, trust_remote_code=True, out=tmp_path / "out")
    assert (folder / "ran").exists()
    assert (tmp_path / "out/code.py").read_text() == (folder / "code.py").read_text()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{% include 'ran' %}",
        "{% import 'ran' as x %}{{ x }}",
    ],
)
def test_a_template_does_not_leave_its_sandbox(template, tmp_path, monkeypatch, tokenizer_dir):
    monkeypatch.chdir(tmp_path)
    tokenizer = checkpoint.load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = template
    with raises_option("row 1"):
        chat_text([{"role": "user", "content": "a"}], tokenizer, "row 1")
    assert not Path("ran").exists()


def test_trust_holds_for_one_command_and_is_not_written(tmp_path):
    assert not trusts_remote_code()
    with remote_code(True):
        assert trusts_remote_code()
    assert not trusts_remote_code()
    named = {"draft": "tiny", "target": "tiny", "data": "stdlib"}
    config = DistillConfig.build({**named, "trust_remote_code": True})
    assert "trust_remote_code" not in config.settings()
    record = {
        "command": "distill",
        "config": {"draft": "tiny", "trust_remote_code": True},
        "inputs": {},
        "versions": {},
        "created": "",
        "seconds": 0.0,
        "peak_memory_bytes": 0,
    }
    (tmp_path / "draftlab.json").write_text(json.dumps(record))
    assert DistillConfig.of_file(tmp_path, "distill", {}) == {"draft": "tiny"}


# settings with text or a path: those that only name what is read as data, and those that act
DATA = {
    "acceptance",
    "base",
    "data",
    "device",
    "device_map",
    "directory",
    "draft",
    "draft_profile",
    "drafter",
    "from_file",
    "gguf",
    "law",
    "loss",
    "models",
    "outputs",
    "outtype",
    "params",
    "prediction",
    "preset",
    "prompt_file",
    "source",
    "reference_losses",
    "rule",
    "scores",
    "served_model_name",
    "server_rule",
    "servers",
    "shape",
    "system_prompt",
    "to",
    "target",
    "target_profile",
    "text",
    "student",
    "k",
    "layers",
    "width",
    "batch",
    "context",
    "draft_vocab",
    "recipe",
    "depth",
    "for",
    "shapes",
    "layer_ids",
}
ACTING = {
    "api_key_file",
    "html",
    "include_path",
    "markdown",
    "out",
    "plot",
    "report_to",
    "scores_cache",
    "server",
    "speculative_server",
    "tasks",
    "verify_with",
}


def settings_of_text() -> list[tuple[str, str]]:
    """Yield every command with every setting whose value is free text or a path."""
    return [
        (command.name, name)
        for command in COMMANDS.values()
        for name, field in command.config.model_fields.items()
        if re.search(r"\b(str|Path)\b", str(field.annotation))
        # the server of auto is the name of a kind
        and (command.name, name) != ("auto", "server")
    ]


@pytest.mark.parametrize(("command", "name"), settings_of_text())
def test_every_setting_is_data_or_acts(command, name):
    """A new setting belongs to one of the two sides: may the record of a stranger's run decide it?"""
    assert (name in ACTING) != (name in DATA)
    acts = extra(COMMANDS[command].config.model_fields[name])["acts"]
    assert (acts is not None) == (name in ACTING)


@pytest.mark.parametrize(
    ("command", "settings", "acting"),
    [
        ("export", {"draft": "tiny", "to": "vllm", "verify_with": "theirs/vllm"}, "--verify-with"),
        ("score", {"target": "tiny", "server": "http://127.0.0.1:1"}, "--server"),
        ("score", {"target": "tiny", "server": "http://h", "api_key_file": "t"}, "--api-key-file"),
        ("score", {"target": "tiny", "tasks": "py_choice,theirs/t.yaml"}, "--tasks"),
        ("score", {"target": "tiny", "tasks": "own"}, "--tasks"),
        ("prune", {"source": "tiny", "out": "elsewhere"}, "--out"),
    ],
)
def test_a_record_does_not_act(command, settings, acting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.PRESETS["tiny"])
    (tmp_path / "own").mkdir()  # a name without a suffix, which is a path here
    provenance.write_record(tmp_path, command, settings, {}, 0.0)
    config = COMMANDS[command].config
    with raises_option(acting, config.build(settings).command_line(command)):
        config.of_file(tmp_path, command, {})


def test_typed_settings_stand_in_for_those_that_act(tmp_path):
    config = COMMANDS["score"].config
    recorded = {"target": "tiny", "tasks": "arc_easy", "out": "theirs", "k": [1, 2]}
    provenance.write_record(tmp_path, "score", recorded, {}, 0.0)
    typed = {"out": Path("mine")}
    assert config.of_file(tmp_path, "score", typed) == recorded | typed
    (tmp_path / "own.yaml").write_text("server: http://127.0.0.1:1\n")
    assert config.of_file(tmp_path / "own.yaml", "score", typed)["server"]  # written to be read


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the folder of native builds, in an empty home."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "draftlab"


def small_build(folder: Path) -> list[str]:
    """Return a compiler command for a library of one function."""
    (folder / "small.cpp").write_text('extern "C" int one() { return 1; }\n')
    return ["c++", "-shared", "-fPIC", str(folder / "small.cpp")]


def test_a_native_build_is_used_only_as_it_was_compiled(cache):
    compile = small_build(cache.parents[1])
    file = native_cpu.private_folder() / "native-x.so"
    native_cpu._compiled(compile, file)
    whole = file.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole[:-1]):
        (cache / "damaged").write_bytes(damage)
        (cache / "damaged").replace(file)  # what is loaded keeps its own pages
        native_cpu._compiled(compile, file)
        assert file.read_bytes() == whole


@pytest.mark.parametrize("change", ["owner", "mode", "folder"])
def test_a_build_of_another_user_is_compiled_again(change, cache, monkeypatch):
    """The build has a checksum that fits."""
    compile = small_build(cache.parents[1])
    file = native_cpu.private_folder() / "native-x.so"
    native_cpu._compiled(compile, file)
    whole = file.read_bytes()
    theirs = cache / "theirs"
    theirs.write_bytes(whole + b"x")
    theirs.replace(file)
    file.with_suffix(".sha256").write_text(provenance.file_sha256(file))
    if change == "owner":
        other = os.geteuid() + 1
        stat = Path.stat
        monkeypatch.setattr(Path, "stat", lambda self, **flags: owned_by(stat(self, **flags), other))
    elif change == "mode":
        file.chmod(0o666)
    else:
        file.unlink()
        file.mkdir()
        with pytest.raises(OSError, match=file.name):  # it is in the way, and not loaded
            native_cpu._compiled(compile, file)
        return
    native_cpu._compiled(compile, file)
    assert file.read_bytes() == whole


def owned_by(info: os.stat_result, user: int) -> os.stat_result:
    return os.stat_result((*info[:4], user, *info[5:]))


def test_a_folder_that_others_write_to_is_no_cache(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(OSError, match=re.escape(str(cache))):
        native_cpu.private_folder()
    cache.rmdir()
    cache.symlink_to(cache.parent)
    with pytest.raises(OSError, match=re.escape(str(cache))):
        native_cpu.private_folder()


def test_a_home_that_cannot_be_written_costs_a_note(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.cpp").write_text('extern "C" int uses_openmp() { return 1; }\n')
    monkeypatch.setattr(native_cpu, "SOURCE", tmp_path / "small.cpp")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    native_cpu.library.cache_clear()
    try:
        assert native_cpu.library()
    finally:
        native_cpu.library.cache_clear()
    assert capsys.readouterr().err


def test_a_link_out_of_a_checkpoint_is_not_copied_but_those_of_the_hubs_cache_are(tmp_path):
    """The cache of the hub keeps files in blobs, and links to them in snapshots/REVISION."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs, out = tmp_path / "models--a--b" / "blobs", tmp_path / "out"
    for folder in (snapshot, blobs, out):
        folder.mkdir(parents=True)
    (blobs / "77").write_text("{}")
    (snapshot / "generation_config.json").symlink_to("../../blobs/77")
    saving.copy_tokenizer(snapshot, out)
    assert (out / "generation_config.json").read_text() == "{}"
    (tmp_path / "secret").write_text("x")
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with raises_option("chat_template.jinja"):
        saving.copy_tokenizer(snapshot, out)
    assert not (out / "chat_template.jinja").exists()
    with raises_option("chat_template.jinja"):  # as a store reads it
        saving.tokenizer_files(snapshot)
