"""Check draftlab's acceptance rules of servers above temperature 0 against the counters of vLLM and llama.cpp.

For each draft and method, a server answers the same prompts at each temperature. draftlab counts the steps that the
server's texts take under the server's rule. Finished measurements are kept, so a run that was killed resumes.

server_rule_gap: draftlab's tokens per target pass minus the server's. half_width: Half the width of draftlab's 95 %
interval over texts. by_method: draftlab's tokens per target pass on the same texts, by the draft's sampling method
(draft_sample_method in vLLM). The method block is vLLM with rejection_sample_method block.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.console import note
from draftlab.exporting import gguf, verify
from draftlab.exporting.artifact import Form, open_artifact
from draftlab.exporting.verify import running
from draftlab.model import checkpoint, hub, modes
from draftlab.prompts import load_prompts
from draftlab.registry import SERVERS
from draftlab.servers.kinds import SampleMethod, ServerKind, ServerTrial


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Prompts, the largest number of tokens of each answer, and the number of drafted tokens per step."""

    prompts: list[list[int]]
    tokens: int
    k: int

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.tokens


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A server with a draft. name: Name for the file of results. method: How the draft samples in the server."""

    name: str
    server: ServerKind
    method: SampleMethod
    command: list[object]


def main(
    drafts: Annotated[list[Path], typer.Argument(help="Drafts and EAGLE-3 heads.")],
    target: Annotated[str, typer.Option(help="Target of the drafts.")],
    prompt_file: Annotated[Path, typer.Option(help="File of prompts. Only first turns are asked.")],
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 64,
    k: Annotated[int, typer.Option(help="Drafted tokens per step.")] = 3,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0.7,1",
    vllm: Annotated[Path | None, typer.Option(help="Path of vllm.")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="Path of llama-server.")] = None,
    methods: Annotated[
        str, typer.Option(help="Methods of vLLM, by comma: probabilistic, greedy, block.")
    ] = "probabilistic,greedy",
    folder: Annotated[Path, typer.Option(help="Folder for exports and results.")] = Path(
        "runs/server-rules"
    ),
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="vLLM's --gpu-memory-utilization.")
    ] = None,
) -> None:
    place = hub.locate(target).absolute()
    asked = load_prompts(
        prompt_file, "", checkpoint.load_tokenizer(place), count=prompts, tokens=None, seed=0
    )
    requests = Requests(prompts=[prompt.ids for prompt in asked.rows], tokens=new_tokens, k=k)
    asked_at = [float(text) for text in temperatures.split(",")]
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for draft in drafts:
        settings = (
            []
            if llama_server is None
            else [in_llama_cpp(folder, draft, place, requests, llama_server)]
        )
        if vllm is not None:
            settings += in_vllm(
                folder, draft, place, requests, vllm, methods.split(","), gpu_memory_utilization
            )
        for setting in settings:
            file = folder / f"{draft.name}-{setting.name}.json"
            if not file.exists():
                found = measured(
                    setting, exported(folder, draft, place, "vllm"), place, requests, asked_at
                )
                file.write_text(json.dumps([{"draft": draft.name, **row} for row in found]))
            rows += json.loads(file.read_text())
    worst = max(rows, key=lambda row: abs(row["server_rule_gap"]) / row["half_width"])
    about = {"benchmark": "server_rules", "target": place.name, "prompts": asked.selection}
    # these two are from the row with the largest gap relative to its half width
    facts = {name: worst[name] for name in ("server_rule_gap", "half_width")}
    print(json.dumps(about | facts | {"rows": rows} | environment(torch.get_num_threads())))


def in_vllm(
    folder: Path,
    draft: Path,
    target: Path,
    requests: Requests,
    program: Path,
    methods: list[str],
    share: float | None,
) -> Iterator[Setting]:
    out, server = exported(folder, draft, target, "vllm"), SERVERS.get("vllm", "--vllm")
    kind = open_artifact(out, target).kind
    for name in methods:
        method: SampleMethod = "greedy" if name == "greedy" else "probabilistic"
        trial = ServerTrial(
            target=target,
            draft=out,
            kind=kind,
            k=requests.k,
            longest=requests.longest,
            method=method,
        )
        *command, speculative = server.command(program, trial)
        if name == "block":
            speculative = json.dumps(json.loads(speculative) | {"rejection_sample_method": "block"})
        command += [speculative, *([] if share is None else ["--gpu-memory-utilization", share])]
        yield Setting(name=f"vllm-{name}", server=server, method=method, command=command)


def in_llama_cpp(
    folder: Path, draft: Path, target: Path, requests: Requests, program: Path
) -> Setting:
    file, out = folder / f"{target.name}.gguf", exported(folder, draft, target, "llama.cpp")
    if not file.exists():
        gguf.write(target, file, "f32")
    server, kind = SERVERS.get("llama.cpp", "--llama-server"), open_artifact(draft, target).kind
    trial = ServerTrial(
        target=file,
        draft=next(out.glob("*.gguf")),
        kind=kind,
        k=requests.k,
        longest=requests.longest,
    )
    command = server.command(program, trial)
    return Setting(name="llama.cpp", server=server, method="greedy", command=command)


def exported(folder: Path, draft: Path, target: Path, to: str) -> Path:
    out = folder / f"{draft.name}-{to}"
    if not out.exists():
        settings: dict[str, Any] = {"outtype": "f32"} if to == "llama.cpp" else {}
        COMMANDS["export"](draft=str(draft), target=str(target), to=to, out=out, **settings)
    return out


def measured(
    setting: Setting, draft: Path, target: Path, requests: Requests, temperatures: list[float]
) -> Iterator[dict[str, Any]]:
    """Let a server answer at each temperature, and yield a row of results for each.

    draftlab counts its steps after the server has ended, when memory is free.
    """
    note(f"starting {setting.name} with {draft.name}")
    device, artifact = checkpoint.resolve_device("auto"), open_artifact(draft, target)
    form, vocab = Form(to="vllm", server=SERVERS.get("vllm", "--vllm")), artifact.target_vocab
    all_answers = []
    with running(setting.command, verify.VLLM_ON_CPU | os.environ) as (server, _):
        for temperature in temperatures:
            asked = {"tokens": requests.tokens, "temperature": temperature, "k": requests.k}
            all_answers.append(verify.ask(server, requests.prompts, vocab=vocab, **asked))
            note(f"temperature {temperature:g} is done")
    model = modes.load(target, torch.float32, device)
    for answered in all_answers:
        found = verify.compare(
            server,
            answered,
            model,
            lambda texts: artifact.scores(draft, form, texts, device),
            ends=checkpoint.eos_token_ids(target),
            vocab=vocab,
            method=setting.method,
        )
        about = {
            "server": f"{server.kind} {server.version}",
            "setting": setting.name,
            "tokens": sum(answered.texts.tokens),
        }
        yield (
            about
            | found.facts()
            | {
                "runtime": setting.name,
                "server_rule_gap": found.expected.value - found.measured,
                "half_width": (found.expected.high - found.expected.low) / 2,
            }
        )


if __name__ == "__main__":
    typer.run(main)
