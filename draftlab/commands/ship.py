"""Commands that bring a finished draft to where it runs: check, trim, export."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from draftlab import workspace
from draftlab.commands.shared import Force, Out, Outcome, TargetName, newest_draft, recorded
from draftlab.model import hub

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
    space = workspace.load()
    draft_dir = hub.locate(draft or newest_draft(space))
    target_dir = hub.locate(target or space.target, weights=False)

    from draftlab.data import heldout_prompts
    from draftlab.export import compatibility as checking
    from draftlab.model import checkpoint

    found = checking.files(draft_dir, target_dir, checking.parse_runtimes(runtimes))
    if not files_only:
        device = checkpoint.resolve_device(space.device)
        reader = checkpoint.load_tokenizer(draft_dir)
        texts = heldout_prompts(hub.check_data(data or space.data), reader, count=PROMPTS, length=PROMPT_TOKENS, seed=0)
        found += checking.runs(draft_dir, texts, checkpoint.resolve_dtype("auto", device), device)
    bad = sum(one.level == "bad" for one in found)
    rows = [{"about": f.about, "level": f.level, "text": f.text, "fix": f.fix} for f in found]
    missed = [f"{bad} finding{'s' * (bad > 1)} to fix before {hub.checkpoint_name(draft_dir)} is served"] if bad else []
    return Outcome(
        path=draft_dir, show=[f.line() for f in found], data={"findings": rows, "fits": not bad}, missed=missed
    )  # fmt: skip


def trim(
    trace: Annotated[Path, Option(help="Trace of the target's own text: its most frequent ids stay.")],
    keep: Annotated[int, Option(min=1, help="Ids that the draft can draft.")],
    draft: DraftDir = None,
    out: Out = None,
    force: Force = False,
) -> Outcome:
    """Compute a draft's head for fewer ids, those that the target writes: less work where the vocabulary is large."""
    arguments, began = recorded(locals())
    from draftlab import provenance
    from draftlab.export import trim as trimming
    from draftlab.model import checkpoint
    from draftlab.target_outputs.traces import read_trace

    space = workspace.load()
    place = hub.locate(draft or newest_draft(space))
    out = out or space.runs / f"trim-{hub.checkpoint_name(place)}-{keep}"
    checkpoint.check_free(out, force=force)
    texts = [text.ids for text in read_trace(trace).texts]
    special = [i for i in checkpoint.special_ids(checkpoint.load_tokenizer(place)).values() if i is not None]
    vocab = checkpoint.vocab_size(place)
    kept = trimming.choose(texts, keep, vocab, special)
    with checkpoint.new_directory(out, force=force) as work:
        trimming.write(place, work, kept)
        provenance.write_record(work, "trim", arguments, [place, trace], began, covered=kept.covered)
    lines = [
        f"head of {keep:,} of {vocab:,} ids; the ids of one half of the texts hold {kept.covered:.2%} of the rest",
        "vLLM, SGLang, llama.cpp and transformers compute the whole head: a smaller one is for our engine",
    ]
    return Outcome(path=out, show=[*lines, str(out)], data={"path": str(out), "keep": keep, "covered": kept.covered})


def export(
    draft: DraftDir = None,
    to: Annotated[
        Literal["hf", "gguf", "vllm", "sglang", "llama.cpp", "transformers"],
        Option(help="A Hugging Face directory, a GGUF file, or either with a script that serves it there."),
    ] = "hf",
    target: TargetName = None,
    kind: Annotated[
        str, Option("--type", help="Of matrices in a GGUF file: f32, f16, bf16, q8_0, q4_0, ...; q4_k_m and its like.")
    ] = "f16",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option(help="Of the weights; as stored if left out.")
    ] = None,
    k: Annotated[int | None, Option(min=1, help="Drafted tokens; the best of a score if left out, or else 4.")] = None,
    verify_with: Annotated[
        Path | None,
        Option(help="Score again there: the vllm program, or for GGUF a python with llama-cpp-python."),
    ] = None,
    data: Annotated[str | None, Option(help="Prompts to verify with; the workspace's if left out.")] = None,
    prompts: Annotated[int, Option(min=2, help="Prompts to verify with.")] = 16,
    push: Annotated[str | None, Option(help="Also upload it to this repository of the Hugging Face hub.")] = None,
    out: Out = None,
    force: Force = False,
) -> Outcome:
    """Write a draft as runtimes load it, with a card and a script that serves it; verify it where it runs."""
    arguments, began = recorded(locals())
    space = workspace.load()
    target_dir = hub.locate(target or space.target, weights=verify_with is not None)

    from draftlab import provenance
    from draftlab.export import run
    from draftlab.model import checkpoint

    place = hub.locate(draft or newest_draft(space))
    checkpoint.check(place)
    out = out or space.runs / f"export-{hub.checkpoint_name(place)}-{kind if to in ('gguf', 'llama.cpp') else to}"
    checkpoint.check_free(out, force=force)
    device = checkpoint.resolve_device(space.device)
    planned = run.Plan(
        draft=place,
        target=target_dir,
        target_name=target or space.target,
        to=to,
        kind=kind,
        dtype=None if dtype is None else checkpoint.DTYPES[dtype],
        k=k,
        verify_with=verify_with,
        data=data or space.data,
        prompts=prompts,
        runs=space.runs,
        device=device,
    )
    run.check(planned)
    with checkpoint.new_directory(out, force=force) as work:
        made = run.export(planned, work, out)
        provenance.write_record(work, "export", arguments, [place], began, **made.notes)
    if push is not None:
        run.push(out, push)
    return Outcome(path=out, show=[*made.lines, str(out)], data={"path": str(out), **made.notes})
