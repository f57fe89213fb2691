"""Let a draft follow the traffic that it serves: python examples/follow_traffic.py TRAFFIC DRAFT OUT

TRAFFIC is a folder of two or more stores of the target's outputs, named in the order of time; `outputs build --from`
stores a server's log. The draft is trained on the last store but one. The last store judges it, and must come from
`outputs build --use replay`: the new draft is worth serving only if it gains tokens per target pass there beyond the
noise. Liu et al. 2023, arXiv 2310.07177.
"""

import sys
from pathlib import Path
from typing import Any

from draftlab.commands import COMMANDS

JUDGED_K = "4"


def follow(traffic: Path, draft: Path, out: Path, **training: Any) -> Path:
    """Train a draft on the last store but one; return the draft to serve, the new draft or the old draft."""
    stores = sorted(file.parent for file in traffic.glob("*/manifest.json"))
    if len(stores) < 2:
        sys.exit(f"{traffic} has {len(stores)} stores, but needs two: one to train on and one to compare on")
    *_, seen, newest = stores
    COMMANDS["distill"](draft=str(draft), outputs=seen, out=out, **training)
    judged = out.with_name(f"{out.name}-judged")
    result: Any = COMMANDS["replay"](directory=newest, draft=[str(draft), str(out)], k=JUDGED_K, out=judged).data
    before, after = (replay["rows"][0]["tokens_per_pass"] for replay in result["replays"])
    print(f"tokens per target pass on {newest.name}: {before['value']:.3f} -> {after['value']:.3f}")
    return out if after["low"] > before["value"] else draft


if __name__ == "__main__":
    print(follow(*map(Path, sys.argv[1:4])))
