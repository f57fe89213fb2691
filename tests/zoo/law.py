"""Every command on one checkpoint, in-process: each works, or refuses in one line that says what and why."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from draftlab.cli import app

from . import words
from .build import build, small
from .facts import YES, Facts, Sizes

RUNNER = CliRunner()
WORKS = "works"
NO_CHEAP_SHAPE = "of the target's time for a pass"
PART = "def part{0}(line):\n    if not line:\n        return {0}\n    return [int(part) for part in line.split(',')]\n"
TEXT = "\n\n".join(PART.format(i) for i in range(200))  # 8 % of paragraphs are held out
BRIEF = "--steps 1 --batch-size 2 --training-dtype float32"
TEACH = f"{BRIEF} --seq-len 32"
TEACH_HEAD = "--steps 8 --batch-size 4 --seq-len 32 --training-dtype float32"
SCORE = "score --k 2 --repeats 1 --num-prompts 2 --prompt-tokens 16 --max-new-tokens 24"
IMPORT = "draftlab import"
UNPACKED = (
    "design",
    "prune depth",
    "distill",
    "outputs build",
    "outputs to replay",
    "score",
    "profile",
    "check",
    "export hf",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command. words: Its refusal, or the failure."""

    step: str
    expected: str  # WORKS, or words that a refusal must have
    works: bool
    words: str
    broken: bool

    @property
    def right(self) -> bool:
        as_expected = self.works if self.expected == WORKS else not self.works and self.expected in self.words
        return as_expected and not self.broken

    def line(self) -> str:
        kind = "broken" if self.broken else WORKS if self.works else "refused"
        return f"{'' if self.right else 'WRONG '}{self.step}: {kind} {self.words[:300]}".rstrip()


BRIEFLY = "--calibration-tokens 128 --seq-len 32"
OUTPUTS = "outputs build --target M --num-sequences 4 --seq-len 32 --top-logprobs 8"
PREDICT = "--k 1-2 --acceptance replay"
SEARCH = "--outputs stored --prompt-file prompts.jsonl --layers 1,2 --k 2 --first-steps 1 --minutes 0.1"
ANSWERS = "outputs build --use replay --target M --num-prompts 2 --prompt-tokens 16 --max-new-tokens 24"


def commands(facts: Facts, draft: str, pruned: bool) -> dict[str, str]:
    """Return by name the commands to type in a folder with a model M, a text, and maybe a draft."""
    width = (small(facts) if pruned else small(draft_for(facts))).hidden // 2
    there = f"--draft {draft} --target M"
    found = {
        "design": f"design --source M --params {_params(small(facts)) // 2} --layers 1-3 --multiple-of 1",
        "prune depth": f"prune --source M --layers 2 {BRIEFLY} --out depth",
        "prune width": f"prune --source M --width {width} {BRIEFLY} --out width",
        "prune masks": f"prune --method masks --source M --layers 2 --steps 2 --batch-size 2 {BRIEFLY} --out masks",
    }
    if pruned:
        found |= {"score a narrow draft": f"{SCORE} --draft width --target M --out score-narrow"}
    else:
        found |= {"distill itself": f"distill --draft M --target M {TEACH} --out again"}
    return found | {
        "distill": f"distill {there} {TEACH} --out distilled",
        "distill on target text": f"distill {there} {TEACH} --text target --prompt-tokens 8 --out on-text",
        "outputs build": f"{OUTPUTS} --out stored",
        "outputs info": "outputs info stored --verify --target M",
        "distill from outputs": f"distill --draft {draft} --outputs stored {BRIEF} --out from-cache",
        "outputs of target text": f"{OUTPUTS} --text target --prompt-tokens 8 --out wrote",
        "outputs to replay": f"{ANSWERS} --out answers",
        "replay": f"replay answers --draft {draft} --k 2 --out replay",
        "score": f"{SCORE} {there} --out score",
        "score a batch": f"{SCORE} {there} --batch 2 --out score-batch",
        "score sampled": f"{SCORE} {there} --temperature 1 --out score-sampled",
        "score without a draft": f"{SCORE} --target M --drafter latest-lookup --out score-lookup",
        "score compiled": f"{SCORE} {there} --mode native --out score-compiled",
        "distill a head": f"distill --student eagle --target M {TEACH_HEAD} --out head",
        "score a head": f"{SCORE} --target M --drafter eagle:heads=head --batch 2 --out score-head",
        "replay a head": "replay answers --draft head --target M --k 2 --out replay-head",
        "profile a head": "profile M head --k 2 --repeats 3 --context 16 --out profile-head",
        "profile": f"profile M {draft} --k 2 --repeats 3 --context 16,48 --out profile",
        "predict": f"predict --draft-profile profile/{draft}.yaml --target-profile profile/M.yaml {PREDICT}/{draft}",
        "search": f"search --target M --source {'M' if pruned else draft} --widths {width} {SEARCH} --out searched",
        "auto, planned": f"auto M --draft {draft} --minutes 600 --dry-run",
        "check": f"check {draft} --target M",
        "export hf": f"export {draft} --target M --to hf --out export-hf",
        "export gguf": f"export {draft} --target M --to gguf --out export-gguf",
        "export vllm": f"export {draft} --target M --to vllm --out export-vllm",
        "score itself": f"{SCORE} --draft M --target M --out score-itself",
        "check itself": "check M --target M",
        "export itself hf": "export M --target M --to hf --out itself-hf",
        "export itself gguf": "export M --target M --to gguf --out itself-gguf",
        "export itself vllm": "export M --target M --to vllm --out itself-vllm",
    }


def expected(facts: Facts, step: str) -> str:
    """WORKS, or what the refusal must say."""
    if step in ("prune depth", "prune width", "prune masks", "design"):
        return WORKS if facts.prune == YES else facts.prune
    if step == "search":
        return WORKS if facts.search == YES else facts.search
    if step == "score compiled":
        return WORKS if facts.runs == YES or facts.prune != YES else "--mode native"
    if step in ("score a batch", "score a head") and facts.rows != YES:
        return facts.rows
    if step == "export itself gguf" or (step == "export gguf" and facts.prune == YES):
        return WORKS if facts.writes_gguf == YES else facts.writes_gguf
    return WORKS


def outcomes(facts: Facts, folder: Path, steps: list[str] | None = None) -> Iterator[Outcome]:
    """Build the checkpoint in folder and try every command on it, or the named ones, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    prompts = "".join(json.dumps({"prompt": PART.format(i)}) + "\n" for i in range(60))
    (folder / "prompts.jsonl").write_text(prompts)
    settings = {"target": "M", "source": "M", "data": str(folder / "text.txt")}
    (folder / "draftlab.yaml").write_text(yaml.safe_dump(settings))
    packed = "bin" in facts.files
    build(facts, folder / ("packed" if packed else "M"))
    pruned = facts.prune == YES
    if not pruned:
        build(draft_for(facts), folder / "D")
    with _chdir(folder):
        if packed:
            for step, line in commands(facts, "packed", pruned=False).items():
                if step in UNPACKED and (steps is None or step in steps):
                    yield outcome(f"{step}, not imported", line.replace(" M", " packed"), IMPORT)
            yield outcome("import", "import packed --out M", WORKS)
        for step, line in commands(facts, "depth" if pruned else "D", pruned).items():
            if steps is None or step in steps:
                yield outcome(step, line, expected(facts, step))


def outcome(step: str, line: str, wanted: str) -> Outcome:
    before = set(os.listdir())
    result: Any = RUNNER.invoke(app, line.split())
    errors = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    # 3: a bar was missed, as check says of a draft with bad findings
    works = result.exit_code in (0, 3)
    # measured times decide whether a shape of a small model is cheap enough to try
    works |= step == "search" and len(errors) == 1 and NO_CHEAP_SHAPE in errors[0]
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return Outcome(step, wanted, False, repr(result.exception), True)
    left = set(os.listdir()) - before - {"runs"}
    if works:
        return Outcome(step, wanted, True, "", False)
    one_line = result.exit_code == 1 and len(errors) == 1 and not left and "Traceback" not in result.stderr
    return Outcome(step, wanted, False, errors[0] if errors else result.stderr[-300:], not one_line)


def _params(s: Sizes) -> int:
    """Return the parameters of a LLaMA of these sizes with a tied head, near enough for a budget."""
    return s.hidden * (s.vocab + s.layers * (3 * s.ffn + 2 * (s.heads + s.kv) * s.head))


def draft_for(facts: Facts) -> Facts:
    """Return a small LLaMA of the same tokenizer: the draft of what cannot be cut."""
    kind = {"merges.txt": "bytes", "tokenizer.model": "sentencepiece"}.get(facts.words, facts.words)
    ids = words.size(kind)  # type: ignore[arg-type]
    sizes = Sizes(layers=30, hidden=576, heads=9, kv=3, head=64, ffn=1536, vocab=ids, tokens=ids, context=8192)
    settings: dict[str, Any] = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    return Facts(
        hub="",
        family="",
        type="llama",
        sizes=sizes,
        config=settings,
        files=["single"],
        words=kind,
        source="known",  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    was = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(was)
