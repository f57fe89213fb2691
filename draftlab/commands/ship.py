"""Commands that bring a finished draft to where it runs: check, export, env."""

from typing import Annotated

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import Outcome, TargetName, newest

DraftDir = Annotated[str | None, Argument(help="Draft's directory; the newest one if left out.")]
PROMPTS, PROMPT_TOKENS = 8, 96  # of held-out text, for a look at what the draft does


def check(
    draft: DraftDir = None,
    target: TargetName = None,
    runtimes: Annotated[
        str, Option("--for", help="Where it is to run, by comma.")
    ] = "vllm,sglang,llama.cpp,transformers",
    data: Annotated[str | None, Option(help="Text for the perplexity; the workspace's if left out.")] = None,
    files_only: Annotated[bool, Option("--files-only", help="Read the files, and run nothing.")] = False,
) -> Outcome:
    """Whether a draft fits its target and will work in vLLM, SGLang, llama.cpp and transformers; 3 if not."""
    from draftlab import check as checking
    from draftlab import checkpoint
    from draftlab.data import prompts

    space = workspace.load()
    draft_dir = checkpoint.locate(draft or newest(space, ("distill", "prune"), "distill"))
    target_dir = checkpoint.locate(target or space.target)
    found = checking.files(draft_dir, target_dir, checking.parse_runtimes(runtimes))
    if not files_only:
        device = checkpoint.resolve_device(space.device)
        reader = checkpoint.load_tokenizer(draft_dir)
        texts = prompts(data or space.data, reader, count=PROMPTS, length=PROMPT_TOKENS, seed=0)
        found += checking.runs(draft_dir, texts, checkpoint.resolve_dtype("auto", device), device)
    bad = sum(one.level == "bad" for one in found)
    rows = [{"about": f.about, "level": f.level, "text": f.text, "fix": f.fix} for f in found]
    missed = [f"{bad} finding{'s' * (bad > 1)} to fix before {draft_dir.name} is served"] if bad else []
    return Outcome(
        path=draft_dir, show=[f.line() for f in found], data={"findings": rows, "fits": not bad}, missed=missed
    )  # fmt: skip
