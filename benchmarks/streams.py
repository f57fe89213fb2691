"""Compare predicted with measured throughput of vLLM at each K and number of streams.

`profile --server` times two servers: one with the target alone, and one that drafts with the largest K. Acceptance
comes from a replay over the target's answers to the same prompts. `vllm bench serve` then sends these prompts to
servers without a draft, with every K, and with the predicted K by batch size. The predicted throughput is that of a
closed loop: a request starts when another request ends, a prefill stops all other requests, and the time of a step
depends on the number of busy streams.

streams_prediction_error: median error over every K of 1 or more and every number of streams. other_k_error: the same
for every K that was not profiled. plain_error: median error without a draft. The vLLM that --vllm names needs pandas
for its client.
"""

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from draftlab.latency.k_schedule import Ranges, schedule

from benchmarks import environment
from draftlab.commands import COMMANDS
from draftlab.console import note
from draftlab.errors import UserError
from draftlab.exporting.verify import VLLM_ON_CPU, running
from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.steps import expected_time, plain_ms, step_costs, steps
from draftlab.latency.workload import Workload, workload_of_replay
from draftlab.model import checkpoint
from draftlab.prompts import load_prompts
from draftlab.provenance import read_record
from draftlab.reading import read_json_lines
from draftlab.servers.vllm import speculative_config
from draftlab.target_outputs.replay import read_replay

BENCH = "prompts.jsonl"  # prompts for vllm bench serve
LONGEST = 160  # largest number of tokens in a prompt
Row = dict[str, Any]
Speculative = dict[str, object] | None


def main(
    folder: Annotated[Path, typer.Option(help="Folder of benchmarks.smollm2.")] = Path(
        "runs/smollm2-study"
    ),
    target: Annotated[
        Path | None, typer.Option(help="Target. Default: SmolLM2 in the folder.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Draft. Default: the distilled draft in the folder.")
    ] = None,
    vllm: Annotated[Path, typer.Option(help="Path of vllm (docs/servers.md).")] = Path(
        "vllm/bin/vllm"
    ),
    out: Annotated[Path, typer.Option(help="Folder for stored outputs and profiles.")] = Path(
        "runs/streams"
    ),
    streams: Annotated[
        str, typer.Option(help="Numbers of concurrent requests, separated by commas.")
    ] = "1,2,4,8",
    ks: Annotated[
        str, typer.Option(help="Drafted tokens, by comma. Only the largest is profiled.")
    ] = "1,2,4",
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 40,
    new_tokens: Annotated[int, typer.Option(help="Largest number of tokens in an answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Repeats of every timing of the profile.")] = 3,
) -> None:
    if not vllm.exists():
        print(json.dumps({"benchmark": "streams", "skipped": "vllm"}))
        return
    target = target or folder / "models" / "smollm2-135m-instruct"
    draft = draft or folder / "runs" / "distilled" / "plain"
    at, drafted = ([int(n) for n in text.split(",")] for text in (streams, ks))
    asked = short_prompts(out, target, folder / "questions.jsonl", prompts, new_tokens)
    stored = {
        "use": "replay",
        "num_prompts": prompts,
        "max_new_tokens": new_tokens,
        "dtype": "bfloat16",
        "prompt_file": asked,
    }
    made("outputs build", out / "answers", target=str(target), **stored)
    made("replay", out / "replay", draft=[str(draft)], directory=out / "answers")
    made(
        "export",
        out / "draft",
        draft=str(draft),
        target=str(target),
        to="vllm",
        dtype="bfloat16",
        k=max(drafted),
    )
    work = workload_of_replay(read_replay(out / "replay" / draft.name))
    file = out / BENCH

    def served(speculative: Speculative) -> Any:
        command = [
            vllm.absolute(),
            "serve",
            target.absolute(),
            "--dtype",
            "bfloat16",
            "--enforce-eager",
        ]
        command += ["--no-enable-prefix-caching", "--max-model-len", 2048, "--max-num-seqs", 64]
        command += [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
        return running(command, os.environ | VLLM_ON_CPU)

    def drafting(k: int, by_batch: Ranges | None = None) -> dict[str, object]:
        return speculative_config(
            str((out / "draft").absolute()), k, "draft model", k_by_batch=by_batch
        )

    loads, measured = [psutil.getloadavg()[0]], {}
    with served(None) as (plain, _), served(drafting(max(drafted))) as (speculative, _):
        COMMANDS["profile"](
            models=[str(target), str(draft)], server=[plain.http.url, speculative.http.url],
            batch=streams, repeats=repeats, out=out / "profile", force=True,
        )  # fmt: skip
        for k, server in ((0, plain), (max(drafted), speculative)):
            measured |= {(k, n): bench(vllm, server.http.url, target, file, n, prompts) for n in at}
    for k in sorted(drafted)[:-1]:
        with served(drafting(k)) as (server, _):
            measured |= {(k, n): bench(vllm, server.http.url, target, file, n, prompts) for n in at}
    loads.append(psutil.getloadavg()[0])
    profiles = [read_profile(out / "profile" / f"{place.name}.yaml") for place in (draft, target)]
    pair = CostModel.of(profiles[0], extrapolate=True), CostModel.of(profiles[1], extrapolate=True)
    rows = [row(pair, work, k, n, measured[k, n]) for k in (0, *drafted) for n in at]
    ranges = schedule(pair[0], pair[1], [work], drafted, max(at), "vllm")
    with served(drafting(ranges.largest_k or 1, list(ranges.ranges))) as (server, _):
        scheduled = {n: bench(vllm, server.http.url, target, file, n, prompts) for n in at}
    print(json.dumps(result(rows, scheduled, ranges.model_dump(), max(drafted)) | {
        "benchmark": "streams", "target": target.name, "draft": draft.name, "prompts": prompts,
        "new_tokens": new_tokens, "load_average": loads,
    } | environment(1)))  # fmt: skip


def made(command: str, out: Path, **settings: Any) -> None:
    """Run a command of draftlab, unless its output exists with the same settings."""
    record = read_record(out)
    if record is None or any(
        str(record.config[name]) != str(value) for name, value in settings.items()
    ):
        COMMANDS[command](out=out, force=True, **settings)


def short_prompts(out: Path, target: Path, questions: Path, count: int, new_tokens: int) -> Path:
    """Write `count` short prompts of one turn to a file for draftlab and to a file for vllm bench serve.

    Return the file for draftlab.
    """
    tokenizer, out_file = checkpoint.load_tokenizer(target), out / "questions.jsonl"
    rows = [{"prompt": each["prompt"]} for _, each in read_json_lines(questions)]
    out.mkdir(parents=True, exist_ok=True)
    out_file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = load_prompts(out_file, "", tokenizer, count=None, tokens=None, seed=0).rows
    short = [i for i, prompt in enumerate(found) if len(prompt.ids) <= LONGEST]
    chosen = [short[int(at)] for at in np.linspace(0, len(short) - 1, count)]
    out_file.write_text("".join(json.dumps(rows[i]) + "\n" for i in chosen))
    texts = [
        {"prompt": tokenizer.decode(found[i].ids), "output_tokens": new_tokens} for i in chosen
    ]
    (out / BENCH).write_text("".join(json.dumps(text) + "\n" for text in texts))
    return out_file


def bench(vllm: Path, url: str, target: Path, file: Path, streams: int, prompts: int) -> Row:
    """Run vllm bench serve, and return its measurements. streams: Number of concurrent requests."""
    note(f"vllm bench serve: {streams} streams")
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "bench",
            "serve",
            "--base-url",
            url,
            "--model",
            target.absolute(),
            "--dataset-name",
            "custom",
        ]
        words += [
            "--dataset-path",
            file.absolute(),
            "--custom-output-len",
            -1,
            "--skip-chat-template",
        ]
        words += [
            "--disable-shuffle",
            "--num-prompts",
            prompts,
            "--max-concurrency",
            streams,
            "--num-warmups",
            1,
        ]
        words += ["--temperature", 0, "--disable-tqdm", "--save-result", "--result-dir", folder]
        words += ["--result-filename", "found.json"]
        done = subprocess.run(
            [vllm.absolute(), *map(str, words)],
            capture_output=True,
            text=True,
            env=os.environ | VLLM_ON_CPU,
        )
        if done.returncode:
            raise UserError(f"vllm bench serve: {done.stderr.strip()[-400:]}")
        found = json.loads((Path(folder) / "found.json").read_text())
    names = (
        "completed",
        "duration",
        "total_output_tokens",
        "output_throughput",
        "mean_tpot_ms",
        "mean_ttft_ms",
    )
    if found["completed"] != prompts:
        raise UserError(
            f"vllm bench serve: {found['completed']} of {prompts} requests were answered"
        )
    return {name: found[name] for name in names}


def row(
    pair: tuple[CostModel, CostModel], work: Workload, k: int, streams: int, measured: Row
) -> Row:
    """Predict the tokens per second at one K and number of streams, and return them with the measured value.

    pair: Cost models of draft and target.
    """
    draft, target = pair
    each = steps(work, k).starts.sum(1)
    by_busy = []
    for busy in range(1, streams + 1):
        costs = step_costs(draft, target, work, max(k, 1), busy, "vllm")
        total = (
            expected_time(costs, work.prompt_tokens, steps(work, k)).total
            if k
            else plain_ms(costs, work)
        )
        by_busy.append(total / each)
    prefill = target.prefill_ms(work.prompt_tokens) + (
        draft.prefill_ms(work.prompt_tokens) if k else 0
    )
    seconds = closed_loop(prefill, each, by_busy) / 1e3
    predicted = float((work.texts.lengths + 1).sum()) / seconds
    return {
        "k": k, "streams": streams, "predicted": predicted, "measured": measured["output_throughput"],
        "error": predicted / measured["output_throughput"] - 1, "bench": measured,
    }  # fmt: skip


def closed_loop(prefill_ms: np.ndarray, number: np.ndarray, step_ms: Sequence[np.ndarray]) -> float:
    """Return the total milliseconds of R requests in a closed loop.

    A request starts when another request ends. A prefill stops all other requests.

    Args:
        number: Number of steps of each request, [R].
        step_ms: Milliseconds of a step of each request, [R], for 1, 2, ... busy streams.
    """
    waiting, busy, now = list(range(len(number)))[::-1], {}, 0.0
    while waiting or busy:
        while waiting and len(busy) < len(step_ms):
            request = waiting.pop()
            now += prefill_ms[request]
            busy[request] = number[request]
        taken = min(busy.values())
        now += taken * float(np.mean([step_ms[len(busy) - 1][request] for request in busy]))
        busy = {request: left - taken for request, left in busy.items() if left > taken}
    return now


def result(
    rows: list[Row], scheduled: Mapping[int, Row], written: dict[str, Any], profiled: int
) -> Row:
    """Return the prediction errors, and the throughput at the predicted K divided by that at the best measured K."""
    by_streams: dict[int, list[Row]] = {}
    for each in rows:
        by_streams.setdefault(each["streams"], []).append(each)
    chosen = {}
    for n, same in by_streams.items():
        predicted, measured = (
            max(same, key=lambda r: r[name]) for name in ("predicted", "measured")
        )
        kept = predicted["measured"] / measured["measured"]
        chosen[n] = {
            "predicted_k": predicted["k"], "measured_k": measured["k"], "predicted_over_best": kept,
            "scheduled_over_best": scheduled[n]["output_throughput"] / measured["measured"],
        }  # fmt: skip

    def error(these: list[Row]) -> float:
        return statistics.median(abs(each["error"]) for each in these)

    return {
        "streams_prediction_error": error([each for each in rows if each["k"]]),
        "other_k_error": error([each for each in rows if each["k"] not in (0, profiled)]),
        "plain_error": error([each for each in rows if not each["k"]]),
        "profiled_k": profiled, "rows": rows, "best_k": chosen, "schedule": written, "scheduled": scheduled,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
