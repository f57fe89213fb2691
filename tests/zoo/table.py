"""docs/models.md, from what is expected of each checkpoint: python -m zoo.table > docs/models.md"""

from .facts import YES, Facts, zoo

HEAD = """# Models

Look up your model's family. Every row was tried with every command, on a small copy with random weights that has the
structure and the file layout of the real checkpoints (`pytest -m slow tests/zoo`). A finetune is of its base's family.

* **Source**: `draftlab prune` cuts a draft out of it, by depth, by width and with masks; `design` and `search` plan it
  (HunYuan: only `design`, because the engine, which times the shapes of a search, does not run its norms).
* **Target**: `distill` (also on its own text), `outputs build`, `replay`, `score` and `check` take it as the target of
  any draft with its tokenizer; `distill` and `score` also take it as the draft.
* **Decoded by** the engine: in every mode. By transformers: eager, beside drafts in every mode. Both decode several
  prompts at once, and draft with EAGLE-3 heads; BLOOM, whose attention takes no positions, decodes one prompt at a
  time.
* **As a draft** it is exported to Hugging Face directories and scripts for vLLM and SGLang, and where the table says so
  to GGUF for llama.cpp.

"""
COLUMNS = ("family", "checkpoints tried", "source", "target", "decoded by", "GGUF")
IMPORT = """
Weights of checkpoints with a * lie in `.bin` files: every command names the `draftlab import` to type first. GGUF files
and LoRA adapters are imported in the same way. So is the text part of multimodal models: InternVL, Llama 4, LLaVA,
LLaVA-NeXT, Mistral 3, Qwen2-VL, Qwen2.5-VL and Qwen3-VL. For text, its logits are those of the complete model.

Models with recurrent layers (Qwen3-Next, Qwen3.5, Falcon-H1, Granite 4, LFM2, Jamba, Mamba) are targets, too, by
transformers. Such layers cannot take tokens back: the engine keeps a snapshot and reads the accepted tokens a second
time, one row after the other. It verifies chains of every drafter, EAGLE-3 heads among them, and no token trees.

## What keeps a family from being a source

Pruning removes whole parts of a LLaMA-like model. Other structures are refused by the tensor that differs; they are
still targets, and a draft for them is cut from a LLaMA-like model with their tokenizer, or trained.

"""


def page() -> str:
    """Return docs/models.md."""
    families: dict[str, list[Facts]] = {}
    for facts in zoo().values():
        families.setdefault(facts.family, []).append(facts)
    rows = [
        COLUMNS,
        ("---",) * len(COLUMNS),
        *(_row(name, members) for name, members in families.items()),
    ]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    why = {facts.family: facts.why for facts in zoo().values() if facts.prune != YES}
    return HEAD + table + "\n" + IMPORT + "\n".join(f"* {name}: {words}" for name, words in why.items()) + "\n"


def _row(family: str, members: list[Facts]) -> tuple[str, ...]:
    first = members[0]
    assert {(m.prune, m.runs, m.writes_gguf) for m in members} == {(first.prune, first.runs, first.writes_gguf)}
    names = ", ".join(m.hub + "*" * ("bin" in m.files) for m in members)
    engine = "the engine" if first.runs == YES else "transformers"
    return family, names, _yes(first.prune), "yes", engine, _yes(first.writes_gguf)


def _yes(wanted: str) -> str:
    return "yes" if wanted == YES else "no"


if __name__ == "__main__":
    print(page(), end="")
