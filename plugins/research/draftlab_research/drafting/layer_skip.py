"""Self-speculation: the target drafts for itself with some of its layers left out."""

from collections.abc import Sequence

from draftlab.model.llama import Llama


def skip_layers(target: Llama, keep: Sequence[int]) -> Llama:
    """Return the target with these layers only; it shares all weights.

    Raises:
        ValueError: no layer, or one that the target does not have.
    """
    if not keep or not set(keep) <= set(range(target.shape.layers)):
        raise ValueError(f"layers {list(keep)} of {target.shape.layers}")
    model = Llama.__new__(Llama)  # plain, even when the target is a native one
    vars(model).update(vars(target))
    model.shape = target.shape.model_copy(update={"layers": len(keep)})
    model.blocks = [target.blocks[i] for i in keep]
    return model
