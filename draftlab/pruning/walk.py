"""Run a model one layer at a time, so that models larger than memory can be calibrated and refitted.

T tokens, D hidden, V vocab. The layers are modules of transformers, so every architecture runs unchanged.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftlab.model import checkpoint

Run = Callable[[Tensor], Tensor]


class Walk:
    """A model that is run in steps: the embedding, each layer, then the head.

    The weights of a step are in memory only inside its `with` block. T is the same for all residual streams, [1, T, D].

    stored: Dtype to which weights are rounded before the model runs, because they are written in it.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: dict[str, object],
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.stored = stored or dtype
        self.model = checkpoint.meta_model(config, dtype)
        self.decoder = self.model.get_submodule("model")
        self.layers = cast(nn.ModuleList, self.model.get_submodule("model.layers"))
        # Granite scales the output of each layer, and the logits
        self.residual_multiplier = float(str(config.get("residual_multiplier", 1.0)))
        self.logits_scaling = float(str(config.get("logits_scaling", 1.0)))
        self._arguments: list[dict[str, Any]] = []  # keyword arguments that the model passes to each layer
        for module in self.model.modules():
            if not list(module.parameters()):
                module.to(device)  # modules without parameters have rotary tables

    @torch.inference_mode()
    def embed(self, ids: list[Tensor]) -> list[Tensor]:
        """Return the residual stream before layer 0, [1, T, D], for each sequence. ids: Token ids, [1, T] each."""
        with (
            self._loaded("model.embed_tokens"),
            self._loaded("model.norm"),
            self._recording() as calls,
        ):
            for row in ids:
                self.decoder(input_ids=row.to(self.device), use_cache=False)
        self._arguments = [arguments for _, arguments in calls[: len(self.layers)]]
        return [stream for stream, _ in calls[:: len(self.layers)]]

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[tuple[nn.Module, Run]]:
        """Load a layer for the `with` block. Yield the layer, and a function that runs it on a stream, [1, T, D]."""
        with self._loaded(f"model.layers.{index}"):
            module = self.layers[index]
            arguments = self._arguments[index]

            @torch.inference_mode()
            def run(stream: Tensor) -> Tensor:
                return module(stream, **arguments)

            yield module, run

    @contextlib.contextmanager
    def norm(self) -> Iterator[nn.Module]:
        """Load the last norm for the `with` block, and yield it."""
        with self._loaded("model.norm"):
            yield self.model.get_submodule("model.norm")

    @contextlib.contextmanager
    def head(self) -> Iterator[tuple[nn.Module, Run]]:
        """Load the last norm and the head for the `with` block. Yield the model, and a function that computes logits.

        The function takes a residual stream, [1, T, D], and returns its logits, [1, T, V].
        """
        norm = self.model.get_submodule("model.norm")

        @torch.inference_mode()
        def run(stream: Tensor) -> Tensor:
            self.decoder.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=norm(stream))
            try:
                return self.model(input_ids=None).logits
            finally:
                del self.decoder.forward

        with self.norm(), self._loaded("lm_head"):
            yield self.model, run

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a loaded module, with their names in a checkpoint."""
        for key, tensor in self.model.get_submodule(name).state_dict().items():
            yield f"{name}.{key}", tensor

    def round_weights(self, module: nn.Module) -> None:
        """Round the weights of a loaded module, which may have changed, to the dtype in which they are written."""
        for parameter in module.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.stored).to(self.dtype)

    @contextlib.contextmanager
    def _loaded(self, name: str) -> Iterator[None]:
        module = self.model.get_submodule(name)
        tied = name == "lm_head" and "lm_head.weight" not in self.weights
        prefix = "model.embed_tokens" if tied else name
        tensors = {
            key: self.weights[f"{prefix}.{key}"].to(self.stored).to(self.device, self.dtype)
            for key in module.state_dict()
        }
        module.load_state_dict(tensors, assign=True)
        yield
        module.to("meta")

    @contextlib.contextmanager
    def _recording(self) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
        """Yield a list to which every call of a layer adds the layer's input and keyword arguments.

        In the `with` block, layers return their inputs unchanged.
        """
        calls: list[tuple[Tensor, dict[str, Any]]] = []

        def record(stream: Tensor, **arguments: Any) -> Tensor:
            calls.append((stream, arguments))
            return stream

        with contextlib.ExitStack() as undo:
            for layer in self.layers:
                layer.forward = record
                undo.callback(delattr, layer, "forward")
            yield calls
