"""Self-speculation: the target drafts for itself without some of its layers."""

from collections.abc import Sequence

from draftlab.model.llama import Llama


def skip_layers(target: Llama, keep: Sequence[int]) -> Llama:
    """Return a model with some of the target's layers, which shares the target's weights.

    keep: Indices of the layers to keep, in the order in which the model runs them.

    Raises:
        ValueError: `keep` is empty, or the target lacks one of the layers.
    """
    if not keep or not set(keep) <= set(range(target.shape.layers)):
        raise ValueError(
            f"cannot keep the layers {list(keep)} out of {target.shape.layers}; name at least one existing layer"
        )
    model = Llama.__new__(Llama)  # a plain Llama, even if the target is a NativeLlama
    vars(model).update(vars(target))
    model.shape = target.shape.model_copy(update={"layers": len(keep)})
    model.blocks = [target.blocks[i] for i in keep]
    return model
