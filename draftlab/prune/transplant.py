"""Another vocabulary for a draft: the target's tokenizer, and rows of embedding and head for its tokens.

A token that both tokenizers have keeps its rows. Any other gets the mean of its pieces' rows, the tokens into which the
draft's old tokenizer splits it: Fast Vocabulary Transfer (Gee et al. 2022, 2402.09977). That a draft may go without
training then is from turboderp's and jukofyork's transplant-vocab. V ids of the draft, W ids of the target.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftlab import provenance
from draftlab.config.make import TransplantConfig, check_other_vocabulary
from draftlab.console import progress
from draftlab.data.conversations import chat_ids
from draftlab.distill.vocabulary import tensors_of_ids
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub, parallel, saving
from draftlab.model.head_ids import read_head_ids, write_head_ids
from draftlab.model.hf_files import VOCABULARY_FILES
from draftlab.model.quantization import check_unquantised
from draftlab.model.token_bytes import Vocabulary, read_vocabulary
from draftlab.model.tokenizer import check_embeds, common_vocabulary
from draftlab.output import Output

MADE_TOGETHER = 4096
IDS = ("bos", "eos", "pad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows of a new vocabulary.

    sources: of each of W ids the draft's ids whose mean its rows are: one is a copy, none the mean of all known ones.
    roles: the special tokens that take over a row from one spelled otherwise, as (target's, draft's).
    """

    sources: list[list[int]]
    known: list[int]
    roles: dict[str, tuple[str, str]]

    @property
    def copied(self) -> int:
        return sum(len(ids) == 1 for ids in self.sources)

    @property
    def from_pieces(self) -> int:
        return sum(len(ids) > 1 for ids in self.sources)

    @property
    def at_mean(self) -> int:
        return sum(not ids for ids in self.sources)

    @property
    def pieces_each(self) -> float:
        """Return the pieces of those that are made from pieces, on average."""
        return sum(len(ids) for ids in self.sources if len(ids) > 1) / max(1, self.from_pieces)

    def facts(self) -> dict[str, object]:
        return {
            "ids": len(self.sources), "copied": self.copied, "from_pieces": self.from_pieces,
            "pieces_each": round(self.pieces_each, 2), "at_mean": self.at_mean,
            "roles": {name: list(tokens) for name, tokens in self.roles.items()},
        }  # fmt: skip

    def describe(self) -> str:
        return (
            f"{len(self.sources):,} ids: {self.copied:,} rows copied, {self.from_pieces:,} made from "
            f"{self.pieces_each:.1f} pieces each, {self.at_mean:,} left at the mean"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A draft and a target of another vocabulary, as their files are."""

    draft: Path
    target: Path
    plan: Plan
    sized: list[str]  # the draft's tensors with a row per id
    head_ids: list[int] | None  # of the draft with the new vocabulary, where its head is trimmed
    mask_token: int | None  # new pard_token, where it is a parallel draft

    def config(self) -> dict[str, object]:
        """Return config.json: the draft's, with the target's vocab_size and special ids."""
        draft, target = checkpoint.read_config(self.draft), checkpoint.text_config(self.target)
        special = checkpoint.special_ids(checkpoint.load_tokenizer(self.target))
        others = {key: value for key, value in draft.items() if not key.endswith(("_token_id", "tokenizer_class"))}
        ids = {f"{name}_token_id": target.get(f"{name}_token_id", special[name]) for name in IDS}
        mask = {} if self.mask_token is None else {parallel.PARD_TOKEN: self.mask_token}
        return others | ids | mask | {"vocab_size": len(self.plan.sources)}


def transplant(config: TransplantConfig, output: Output) -> Plan:
    """Write the draft with the target's vocabulary, a tensor at a time; return where its rows come from.

    Raises:
        UserError: see open_pair; or no room on the disk.
    """
    pair = open_pair(config)
    weights = checkpoint.Weights(pair.draft)
    output.check_space(_bytes_of(pair, weights), "the draft")
    with output.directory() as work:
        tensors = _with_progress(weights, pair)
        size = saving.write_checkpoint(work, pair.config(), tensors, pair.target)
        if pair.head_ids is not None:
            write_head_ids(work, pair.head_ids)
        common_vocabulary(work, pair.target)
        (work / "README.md").write_text(_card(pair, output.command_line))
        output.record(work, [pair.draft], **pair.plan.facts(), tokenizer=_tokenizer_sha256(pair.target), bytes=size)
    return pair.plan


def estimate(config: TransplantConfig) -> dict[str, object]:
    """Return what a transplant needs and gives, for --dry-run; no weight is read. Raises UserError: see open_pair."""
    pair = open_pair(config)
    weights = checkpoint.Weights(pair.draft)
    largest = max(_bytes_of(pair, weights, name) for name in weights)
    return {
        **pair.plan.facts(),
        "disk": f"{_bytes_of(pair, weights) / 1e6:,.4g} MB",
        "memory": f"about {(saving.SHARD_BYTES + 3 * largest + 5e8) / 1e9:.1f} GB",
    }


def open_pair(config: TransplantConfig) -> Pair:
    """Return draft and target with the plan of the new rows; no weight is read.

    Raises:
        UserError: one of them cannot be read, is quantised, or has a tokenizer whose tokens are not known as bytes; or
            they have the same vocabulary.
    """
    draft, target = config.directories()
    checkpoint.check(draft)
    check_unquantised(draft, checkpoint.read_config(draft))
    sized = tensors_of_ids(draft)
    for model in (draft, target):
        check_embeds(model)
    sizes = checkpoint.vocab_size(draft), checkpoint.vocab_size(target)
    old, new = read_vocabulary(draft, sizes[0]), read_vocabulary(target, sizes[1])
    check_other_vocabulary(
        draft, target, same=all(old.spelling.get(i) == new.spelling.get(i) for i in range(min(sizes)))
    )
    roles = matching_roles(old, new, roles_of(draft), roles_of(target))
    sources = plan_rows(old, new, sizes[1], roles)
    mask, new_mask = parallel.pard_token(draft), None
    if mask is not None:
        new_mask = parallel.unused_id(target, sizes[1])
        sources[new_mask] = [mask]
    in_head = read_head_ids(draft, sizes[0])
    plan = Plan(
        sources=sources, known=sorted(old.spelling),
        roles={name: (new.special[a], old.special[b]) for name, (a, b) in roles.items()},
    )  # fmt: skip
    return Pair(
        draft=draft, target=target, plan=plan, sized=sized, mask_token=new_mask,
        head_ids=None if in_head is None else trimmed(sources, in_head),
    )  # fmt: skip


def roles_of(directory: Path) -> dict[str, int]:
    """Return the special ids that begin and end a turn of a chat, and a text, and the one that pads."""
    tokenizer = checkpoint.load_tokenizer(directory)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles: dict[str, int | None] = {}
    if tokenizer.chat_template:
        messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        try:
            two, three = (chat_ids(messages[:n], tokenizer, str(directory), reply=False) for n in (2, 3))
        except UserError:  # a template of another kind of conversation
            two = three = []
        after = three[len(two) :] if three[: len(two)] == two else []
        markers = {"end of turn": two[::-1], "start of turn": after}
        roles |= {name: next((i for i in ids if i in special), None) for name, ids in markers.items()}
    ids = checkpoint.special_ids(tokenizer)
    roles |= {name: ids[name] for name in ("eos", "bos", "pad")}
    return {name: i for name, i in roles.items() if i is not None and i in special}


def matching_roles(
    old: Vocabulary, new: Vocabulary, old_roles: Mapping[str, int], new_roles: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return the roles in which a special id of the target takes the row of the draft's that is spelled otherwise.

    An id takes one row, by its first role. Padding takes only a row that no other id takes: it is never proposed.
    """
    shared = {old.added[content] for content in new.added.keys() & old.added.keys()}
    roles: dict[str, tuple[int, int]] = {}
    for name in (name for name in new_roles if name in old_roles):
        a, b = new_roles[name], old_roles[name]
        if a not in new.special or b not in old.special or new.special[a] in old.added:
            continue
        used = shared | {source for _, source in roles.values()}
        if a not in [i for i, _ in roles.values()] and not (name == "pad" and b in used):
            roles[name] = (a, b)
    return roles


def plan_rows(old: Vocabulary, new: Vocabulary, size: int, roles: Mapping[str, tuple[int, int]]) -> list[list[int]]:
    """Return the sources of each id below size; see Plan.

    Of several tokens of the target that stand for the same bytes the one that text is made of takes the draft's row;
    another takes one that is spelled as it is, or none: their logits would be equal.
    """
    by_role = dict(roles.values())
    by_spelling = {old.spelling[i]: i for i in old.text}

    def source(i: int) -> list[int]:
        spelling, text = new.spelling.get(i), new.text.get(i)
        if spelling in new.added and spelling in old.added:
            return [old.added[spelling]]
        if text is None:
            return [by_role[i]] if i in by_role else []
        same = by_spelling.get(spelling or "")
        if same is not None and old.text[same] == text:
            return [same]
        if new.canonical[text] != i:
            return []
        return [old.canonical[text]] if text in old.canonical else old.split(text)

    return [source(i) for i in range(size)]


def new_rows(rows: Tensor, plan: Plan) -> Tensor:
    """Return the rows of the new vocabulary, [W, ...], of those of the old, [V, ...]."""
    mean = rows[plan.known].mean(0, dtype=torch.float32).to(rows.dtype)
    result = mean.expand(len(plan.sources), *mean.shape).clone()
    copied = {i: ids[0] for i, ids in enumerate(plan.sources) if len(ids) == 1}
    result[list(copied)] = rows[list(copied.values())]
    split = [i for i, ids in enumerate(plan.sources) if len(ids) > 1]
    for at in range(0, len(split), MADE_TOGETHER):
        part = split[at : at + MADE_TOGETHER]
        counts = torch.tensor([len(plan.sources[i]) for i in part])
        pieces = rows[[piece for i in part for piece in plan.sources[i]]].float()
        owner = torch.arange(len(part)).repeat_interleave(counts)
        sums = pieces.new_zeros(len(part), *mean.shape).index_add_(0, owner, pieces)
        result[part] = (sums / counts.view(-1, *[1] * mean.ndim)).to(rows.dtype)
    return result


def trimmed(sources: list[list[int]], in_head: list[int]) -> list[int]:
    """Return the ids of a trimmed head in the new vocabulary: those whose sources are all in the old one."""
    own = set(in_head)
    return [i for i, ids in enumerate(sources) if ids and own.issuperset(ids)]


def _with_progress(weights: checkpoint.Weights, pair: Pair) -> Iterator[tuple[str, Tensor]]:
    with progress("transplant", len(weights)) as advance:
        for number, name in enumerate(weights):
            advance(number, "tensors")
            yield name, new_rows(weights[name], pair.plan) if name in pair.sized else weights[name]


def _bytes_of(pair: Pair, weights: checkpoint.Weights, *names: str) -> int:
    """Return the bytes of tensors with the new vocabulary, by default of all."""
    values = 0
    for name in names or weights:
        first, *others = weights.shape(name)
        values += torch.Size([len(pair.plan.sources) if name in pair.sized else first, *others]).numel()
    return values * weights.dtype.itemsize


def _tokenizer_sha256(directory: Path) -> str:
    return provenance.file_sha256(next(file for name in VOCABULARY_FILES if (file := directory / name).is_file()))


def _card(pair: Pair, command: str) -> str:
    name, target, plan = hub.checkpoint_name(pair.draft), hub.checkpoint_name(pair.target), pair.plan
    roles = "".join(f"* {role}: {new!r} takes the row of {old!r}.\n" for role, (new, old) in plan.roles.items())
    return f"""---
base_model: {name}
tags: [speculative-decoding, draft-model]
---

# {name} with the vocabulary of {target}

A draft for speculative decoding with **{target}**: the weights of {name} with the tokenizer of {target}, not trained
since. Train it on the target's answers before it is served: `draftlab distill`.

* {plan.copied:,} of {len(plan.sources):,} rows of embedding and head are copies: both tokenizers have the tokens.
* {plan.from_pieces:,} are the mean of the rows of their pieces, {plan.pieces_each:.1f} tokens of the old tokenizer on
  average (Fast Vocabulary Transfer, Gee et al. 2022, arXiv 2402.09977).
* {plan.at_mean:,} are the mean of all: ids without a token, and tokens, most of them special ones, for which {name} has
  nothing.
{roles}
```
{command}
```
"""
