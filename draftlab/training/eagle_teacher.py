"""The target as teacher of an EAGLE-3 head: one pass gives its distributions and the states that the head reads.

B rows, T positions, N tokens that count, E hidden, A layers read, V vocab, W draft vocab.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftlab.data import Batch
from draftlab.model.hf_decoder import decoder_layers
from draftlab.training.eagle_head import TargetPass
from draftlab.training.fused_loss import Dense
from draftlab.training.losses import wide
from draftlab.training.teachers import OutputHead, logits_of

ROWS = 256  # rows of whole logits at once


class EagleTeacher:
    """A frozen target that transformers runs, with hooks on the layers that the head reads.

    It may be spread over devices and disk by accelerate. All that it returns is on device, the student's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: tuple[int, ...],
        ids: Tensor,
        temperature: float,
        device: torch.device,
    ) -> None:
        """ids: the target's id of each draft id, [W]. temperature: The temperature of the loss.

        Raises:
            UserError: the model's layers cannot be found.
        """
        self.model = model.eval().requires_grad_(False)
        self.ids, self.temperature, self.device = ids.to(device), temperature, device
        self.head = OutputHead.of(model, logits_of(model))
        self.whole_head = self.weight if self.head.plain else None
        self.draft_head = None if self.whole_head is None else self.whole_head[self.ids]
        self.states: dict[int, Tensor] = dict.fromkeys(layer_ids, torch.empty(0))
        layers = decoder_layers(model)
        for layer_id in layer_ids:
            if layer_id == 0:
                layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                layers[layer_id - 1].register_forward_hook(self._keeper(layer_id))

    @property
    def takes_packed(self) -> bool:
        return self.head.takes_packed

    @property
    def vocab(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> Tensor:
        return (
            cast(nn.Module, self.model.get_output_embeddings())
            .get_parameter("weight")
            .detach()
            .to(self.device)
        )

    @property
    def embedding(self) -> Tensor:
        return (
            cast(nn.Module, self.model.get_input_embeddings())
            .get_parameter("weight")
            .detach()
            .to(self.device)
        )

    @torch.no_grad()
    def distributions(self, batch: Batch) -> TargetPass:
        """Return the target's distributions at the positions that count, and its states at all."""
        ids = torch.from_numpy(batch.ids[:, :-1]).to(self.model.device)
        counted = torch.from_numpy(batch.mask).flatten().nonzero().squeeze(1)
        positions = None if batch.positions is None else torch.from_numpy(batch.positions)
        hidden = self.head.hidden_and_weight(self.model, ids, counted, positions)[0].to(self.device)
        states = self._joined()  # states of that pass
        if self.whole_head is None:
            return TargetPass(
                Dense(hidden[:, self.ids], None, log_total=self._log_total(hidden)), states
            )
        total = torch.cat(
            [self._log_total(part @ self.whole_head.T) for part in hidden.split(ROWS)]
        )
        return TargetPass(Dense(hidden, self.draft_head, log_total=total), states)

    @torch.no_grad()
    def states_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that the head reads, [B, T, A E], and what the target's output layer reads, [B, T, E]."""
        decoder, ids = cast(Any, self.model.get_decoder()), ids.to(self.model.device)
        read = decoder(input_ids=ids, use_cache=False).last_hidden_state
        return self._joined(), read.to(self.device)

    def _joined(self) -> Tensor:
        return torch.cat([self.states[i].to(self.device) for i in sorted(self.states)], -1)

    def _log_total(self, logits: Tensor) -> Tensor:
        return torch.logsumexp(wide(logits) / self.temperature, -1)

    def _keeper(self, layer_id: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.states[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_input(self, module: nn.Module, args: Any, named: Any) -> None:
        self.states[0] = args[0] if args else named["hidden_states"]
