"""llama.cpp's llama-server, as of llama-cpp-python 0.3.36 and xllamacpp 2026.10.

The server returns no log-probabilities of prompts. Those of generated tokens are computed before all samplers. It
computes none for tokens of a step that drafted, and none for tokens that leave a character of UTF-8 unfinished.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from draftlab.config.server_rules import DecodingRule
from draftlab.errors import UserError
from draftlab.model.shape import multiples_near
from draftlab.sampling import Filter, SamplingParams
from draftlab.servers import kinds
from draftlab.servers.kinds import (
    ABOVE_ZERO,
    PROMPT_LOOKUP_MAX,
    SCRIPT_DIRECTORY,
    About,
    Answer,
    Artifact,
    DraftedTokens,
    Finding,
    Launch,
    RowError,
    ServedCompletion,
    ServedHead,
    ServerKind,
    ServerTrial,
    error,
    server,
    shell_script,
    warning,
)

# number of weights in a block that shares a scale: plain types, K types
BLOCK = 32
K_BLOCK = 256
CHARACTER_BYTES = 4  # most tokens of a character of UTF-8
LEAST_CONTEXT = 256  # smallest context of llama-server
CACHE_FULL = "context size has been exceeded"  # the server's error if its slots share a cache that is too small
# without -np, llama-server has four slots that share one cache
SLOTS = """# -np N: N requests at once, each in its own part of the context (-c). Without -np, four slots share one:
# greedy texts then depend on other requests, and requests that fit alone can end with error 500."""
# order of llama.cpp's sampler chain
SAMPLERS: tuple[Filter, ...] = ("top_k", "top_p", "min_p", "temperature")


@server("llama.cpp")
class LlamaCpp(ServerKind):
    loads_gguf = True
    vocab_slack = 128
    heads = "loads it as GGUF (draftlab export --to llama.cpp), with --spec-type draft-eagle3"
    rules: ClassVar[Mapping[str, DecodingRule]] = {"": DecodingRule("match", draft=(), target=SAMPLERS)}
    head_parts = frozenset({"norm_before_residual", "norm_before_fc"})
    program = "llama-server"
    environment = ("LLAMA_API_KEY", "LLAMA_ARG_")
    operands = ("TARGET.gguf",)
    cuts_last_step = True
    counts_end = False
    owned_by = "llamacpp"
    path = "/completion"
    about_path = "/props"
    has_prompt_logprobs = False

    def check_draft(self, artifact: Artifact) -> Iterator[Finding]:
        try:
            pre, match = artifact.pre_tokenizer()
        except UserError as failure:
            yield error(self.name, f"cannot run it: {failure}")
            return
        if match < 1:
            text = f"splits some texts unlike this tokenizer; its {pre!r} gives the same ids for "
            fix = "the target has the same limitation; send token ids instead of text if this matters"
            yield warning(self.name, f"{text}{match:.0%} of the probe texts", fix)
        shape = artifact.shape
        assert shape is not None  # pre_tokenizer has refused other architectures
        rows = {
            "--width": shape.hidden,
            "heads x head_dim": shape.heads * shape.head_dim,
            "--ffn": shape.ffn,
        }
        for block, types in ((BLOCK, "Q8_0 and Q4_0"), (K_BLOCK, "the K types")):
            odd = {name: size for name, size in rows.items() if size % block}
            for name, size in odd.items():
                text = f"{name} {size} is not a multiple of {block}, so its matrices stay f16 in {types}"
                fix = f"prune to {name} {' or '.join(map(str, multiples_near(size, block)))}"
                yield warning(self.name, text, fix)
            if odd:
                return

    def check_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        if len(head.layer_ids) != 3:
            text = f"supports heads that read three layers, but this head reads {len(head.layer_ids)}"
            yield error(self.name, text, "train a head with three layer_ids")
        try:
            artifact.pre_tokenizer()
        except UserError as failure:
            yield error(self.name, f"cannot run it: {failure}")

    def lookup(self, device: str) -> str:
        return "ngram-simple"

    def script(self, launch: Launch) -> tuple[str, str]:
        lines = [
            (
                "# sh serve.sh TARGET.gguf [options of llama-server]; draftlab export "
                f"{launch.target} --to gguf writes TARGET.gguf"
            )
        ]
        target_file = "target=${1:?is missing: sh serve.sh TARGET.gguf}; shift"
        # llama.cpp never drafts fewer tokens than its n-gram has
        if launch.kind == "prompt lookup":
            sizes = f"--spec-ngram-simple-size-n {min(PROMPT_LOOKUP_MAX, launch.k)}"
            lines += [
                SLOTS,
                target_file,
                'exec llama-server --model "$target" -np 1 --spec-type ngram-simple \\',
                f'    {sizes} --spec-ngram-simple-size-m {launch.k} "$@"',
            ]
            return shell_script(launch, lines)
        head = launch.kind == "EAGLE-3 head"
        if not head:
            lines.append("# builds before 2026: --model-draft FILE --draft-max K --draft-min 1 --draft-p-min 0")
        lines = [
            f"# {ABOVE_ZERO}; --spec-draft-sampling greedy, where a build has this option",
            *lines,
            SLOTS,
            SCRIPT_DIRECTORY,
            target_file,
            f'exec llama-server --model "$target" -np 1 --spec-type {_spec_type(head)} \\',
            f'    --spec-draft-model "$here"/{shlex.quote(launch.file)} --spec-draft-n-max {launch.k} "$@"',
        ]
        return shell_script(launch, lines)

    def command(self, program: Path, trial: ServerTrial) -> list[object]:
        options: dict[str, object] = {
            "model": trial.target,
            "spec-type": _spec_type(trial.kind == "EAGLE-3 head"),
            "spec-draft-model": trial.draft,
            "spec-draft-n-max": trial.k,
            "spec-draft-p-min": 0,
            "ctx-size": max(LEAST_CONTEXT, trial.longest + 2 * trial.k + 2),
            "parallel": 1,
            "threads": 1,
            "cache-ram": 0,
            "flash-attn": "off",
            "cache-type-k": "f32",
            "cache-type-v": "f32",
            "spec-draft-type-k": "f32",
            "spec-draft-type-v": "f32",
        }
        command: list[object] = [program.absolute(), "--metrics"]
        for name, value in options.items():
            command += [f"--{name}", value]
        return command

    def page(self, path: str, model: str) -> str:
        """See ServerKind. A router (llama-server without --model) passes it on to the server of this model."""
        return f"{path}?model={quote(model, safe='')}"

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> About:
        settings = page.get("default_generation_settings", {})  # of a slot
        # a router's own page has 0 for values of models
        context = settings.get("n_ctx") or None
        slots = page.get("total_slots") or None
        return About(page.get("build_info", "unknown"), context, slots)

    def shares_context(self, status: int, text: str) -> bool:
        return status == 500 and CACHE_FULL in text.lower()

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        if sampling.stop_token_ids:
            raise UserError(
                "llama.cpp's server stops only at the end-of-text token of its model; leave stop_token_ids out"
            )
        return {
            "prompt": prompt,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "samplers": list(SAMPLERS),
            "cache_prompt": False,
            "n_probs": 0 if k is None else max(1, k),
            "return_tokens": True,
        }

    def completion(self, prompt: list[int], answer: Answer, k: int) -> ServedCompletion:
        # the list is absent if no token has a log-probability
        tokens = answer.get("completion_probabilities", [])
        ids = answer["tokens"]
        scored = [token["id"] for token in tokens]
        drafted = answer.get("timings", {}).get("draft_n", 0)
        if drafted or not all(token["top_logprobs"] for token in tokens):
            raise DraftedTokens("tokens of a step that drafted have log-probability 0 and no list")
        text = answer.get("content", "")
        missing = len(ids) - len(scored)
        # the text of an answer that ends inside a character may be ASCII, because it lacks this character
        cut = missing <= CHARACTER_BYTES and ids[: len(scored)] == scored and (scored or not text)
        if missing > 0 and (cut or (not text.isascii() and _is_part(scored, ids))):
            raise RowError(
                "the answer has characters of several tokens, which get no log-probabilities",
                "answers with characters of several tokens, of which llama.cpp returns no log-probabilities",
                limited=False,
            )
        kinds.check_same_ids(ids, scored)
        tops = []
        for token in tokens if k else []:
            row = [(top["id"], top["logprob"]) for top in token["top_logprobs"]]
            tops.append(kinds.top_k(row, k))
        logprobs = [token["logprob"] for token in tokens]
        return kinds.completion(prompt, self.written(answer), logprobs, tops)

    def written(self, answer: Answer) -> tuple[list[int], Any]:
        return answer["tokens"], {"eos": "stop", "limit": "length"}[answer["stop_type"]]

    def tokenize_request(self, text: str) -> dict[str, Any]:
        return {"content": text, "add_special": False}


def _is_part(some: list[int], ids: list[int]) -> bool:
    """Return whether `some` is `ids` without some of its elements."""
    rest = iter(ids)
    return all(token in rest for token in some)


def _spec_type(head: bool) -> str:
    return "draft-eagle3" if head else "draft-simple"
