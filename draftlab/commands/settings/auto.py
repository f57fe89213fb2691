"""The settings of the command `auto`. Torch is not loaded."""

from pathlib import Path
from typing import Any

from draftlab.config import shared
from draftlab.config.base import Numbers, Only, OutputConfig, numbers, option
from draftlab.config.server_rules import SERVER_RULES, ServerRule
from draftlab.registry import SERVERS

SERVED = [name for name in SERVER_RULES if name in SERVERS.names()]


class AutoConfig(OutputConfig, shared.CheckpointSettings):
    """The settings of the command `auto`: the target, how it is served, and the time to spend."""

    target: str = option(
        help="Checkpoint of the target: a directory or a hub name, optionally with @REVISION.",
        argument=True,
    )
    minutes: float = option(60.0, "Time to spend, approximately.", gt=0)
    draft: list[str] = option(
        [],
        "Draft that exists already: a smaller model, a pruned draft, or an EAGLE-3 head; repeat the option for "
        "several drafts. New drafts are then trained only if they may become faster than these drafts.",
    )
    server: ServerRule = option(
        None,
        (
            f"Server that will run the draft: {', '.join(SERVED)}. Only drafts that this server can run are "
            "tried. Default: draftlab's own engine."
        ),
        flag="--for",
    )
    prompt_file: Path | None = option(
        None,
        "JSON-lines file of your users' prompts; for training drafts, at least 96 prompts. Default: draftlab's own "
        "prompts for a chat model; for other models, prompts cut from --data.",
        flag="--prompts",
    )
    data: str | None = option(
        None,
        "Text from which prompts are cut, for a target without a chat template. Default: data in draftlab.yaml.",
    )
    streams: Numbers = numbers(
        "1",
        "Numbers of concurrent requests, as 1,4,16. auto chooses the draft with the highest mean speed-up.",
    )
    temperature: float = option(0.0, "Sampling temperature of your users' requests; 0 is greedy.", ge=0)
    verify_with: Path | None = option(
        None,
        "Path of the program vllm or llama-server, in which the exported draft is verified. Default: the program on "
        "the PATH, if there is one.",
        reads="nothing",
        acts="always",
    )
    dtype: shared.WeightsDtype = shared.dtype(advanced=True)
    device: str = shared.device()
    threads: int | None = shared.threads()

    only = (
        Only(
            ("data",),
            lambda c: c.prompt_file is None,
            "leave it out, because --prompts has the prompts",
        ),
        Only(
            ("verify_with",),
            lambda c: c.server and c.server_kind.program,
            "works only with --for vllm or --for llama.cpp, whose servers draftlab can start",
        ),
        Only(
            ("streams",),
            lambda c: not c.server or not c.server_kind.one_stream,
            "leave it out, because this server decodes one prompt at a time",
        ),
        Only(
            ("out",),
            lambda c: "," not in str(c.out),
            "the name must not have a comma, because a comma separates the options of drafters",
        ),
    )

    @property
    def text_source(self) -> str | None:
        return self.data

    @property
    def sampled_rule(self) -> str | None:
        """Return the decoding rule, as in --server-rule, of the server that the exported script starts.

        Return None for greedy decoding and for draftlab's own engine.
        """
        return self.server if self.temperature > 0 else None

    @property
    def server_kind(self) -> Any:
        """Return the registered class of the server that --for names."""
        return SERVERS.get(str(self.server), "--for")
