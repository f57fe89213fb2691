"""Refit a draft after the cut, so that its residual stream follows the source's.

Source and draft run side by side, one layer at a time. The matrices that write to the draft's residual stream, o_proj
and down_proj, are fitted by least squares.

Shapes: T tokens, D hidden dimensions of the source, D' of the draft, N inputs and M outputs of a matrix, V vocab.
Residual streams are [1, T, D] in the source and [1, T, D'] in the draft.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.model.devices import exact, exact_products
from draftlab.model.trimmed_head import only
from draftlab.pruning.walk import Run, Walk
from draftlab.reading import reading

Stream = Tensor
MLP_NORM = "post_attention_layernorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Adjustments after the cut that make the draft follow the source.

    Args:
        norms: Whether to scale the weights of the norms for the smaller width.
        layers: Whether to fit o_proj and down_proj to the source's residual stream.
        head: Whether to fit lm_head to the source's logits.
        ridge: Strength of the ridge penalty that pulls a fit toward the cut weights.
    """

    norms: bool = True
    layers: bool = True
    head: bool = False
    ridge: float = 0.005

    @property
    def fits(self) -> bool:
        """Return whether any adjustment is on, so that calibration text is needed."""
        return self.norms or self.layers or self.head


REFITS = {
    "none": Refit(norms=False, layers=False),
    "norms": Refit(layers=False),
    "layers": Refit(),
    "head": Refit(head=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well a draft agrees with its source on held-out text, as means over the tokens.

    Attributes:
        predictable: Number of tokens whose ids the draft's head has. It equals `tokens` unless the head is trimmed.
        source_cross_entropy: Cross-entropy of the source in nats per predictable token.
        cross_entropy: Cross-entropy of the draft in nats per predictable token.
        acceptance: Mean probability that the source accepts a token of the draft: the sum of min(p, q) over the
            vocabulary, with p of the source and q of the draft.
        top1: Share of tokens at which both models have the same argmax.
    """

    tokens: int
    predictable: int
    source_cross_entropy: float
    cross_entropy: float
    acceptance: float
    top1: float


class Lockstep:
    """Fit the draft's weights while source and draft run over the same text, layer by layer.

    Each layer of the draft is fitted to the source's residual stream before the next kept layer. The fitted layer thus
    also makes up for the dropped layers in between.
    """

    def __init__(
        self,
        source: Walk,
        draft: Walk,
        *,
        layers: list[int],
        basis: Tensor,
        refit: Refit,
        head_ids: list[int] | None = None,
    ) -> None:
        """Set up the run.

        Args:
            layers: Layers of the source that the draft keeps.
            basis: Map from the source's residual stream to the draft's, [D, D'].
            head_ids: Token ids of the draft's trimmed head. None for a complete head.
        """
        self.source, self.draft, self.layers, self.refit = source, draft, layers, refit
        self.basis = basis.to(source.device, torch.float32)
        self.head_ids = head_ids
        self.agreement: Agreement | None = None  # set when tensors() has yielded all tensors

    def tensors(
        self, chunks: list[Tensor], heldout: list[Tensor], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and fitted tensors of the draft. At the end, set `agreement`.

        Args:
            chunks: Token ids to fit on, [1, T] each.
            heldout: Held-out token ids, [1, T + 1] each. A fit that does not lower the error on this text is discarded.
            advance: Function that is called with the number of finished layers of the source.
        """
        self.fitted = len(chunks)
        ids = chunks + [row[:, :-1] for row in heldout]
        streams, draft_streams = self.source.embed(ids), self.draft.embed(ids)
        yield "model.embed_tokens.weight", self.draft.weights["model.embed_tokens.weight"]
        streams = self._run_layers(range(self.layers[0]), streams, advance)
        for j, layer in enumerate(self.layers):
            before = streams
            with self.source.layer(layer) as (module, run):
                pairs = [_recorded(module, run, stream, MLP_NORM) for stream in before]
            middle, streams = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            after = self.layers[j + 1] if j + 1 < len(self.layers) else len(self.source.layers)
            streams = self._run_layers(range(layer + 1, after), streams, advance)
            with self.draft.layer(j) as (module, run):
                self._rescale(module.get_submodule("input_layernorm"), before)
                self._rescale(module.get_submodule(MLP_NORM), middle)
                del before
                if self.refit.layers:
                    self._refit_layer(
                        module, run, ["self_attn.o_proj", MLP_NORM], draft_streams, middle
                    )
                    self._refit_layer(module, run, ["mlp.down_proj"], draft_streams, streams)
                self.draft.round_weights(module)
                draft_streams = [run(stream) for stream in draft_streams]
                advance(after)
                yield from self.draft.tensors(f"model.layers.{j}")
        yield from self._head(streams, draft_streams, heldout)

    def _run_layers(
        self, layers: range, streams: list[Stream], advance: Callable[[int], None]
    ) -> list[Stream]:
        for layer in layers:
            with self.source.layer(layer) as (_, run):
                streams = [run(stream) for stream in streams]
            advance(layer + 1)
        return streams

    def _rescale(self, norm: nn.Module, streams: list[Stream]) -> None:
        """Multiply the weight of a draft's norm, so that its output has the same scale as in the source.

        Without this, the scale differs, because the draft's norm takes the mean square over fewer dimensions.

        streams: The source's residual stream before the norm, [1, T, D] for each chunk.
        """
        if not self.refit.norms:
            return
        ratios = torch.cat(
            [_rms(self._project(s)) / _rms(s.float()) for s in streams[: self.fitted]], 1
        )
        if not ratios.mean().isfinite():
            raise UserError(
                "--refit: the residual stream of the source is not finite on this text; use another --source or --data"
            )
        norm.get_parameter("weight").data.mul_(ratios.mean())

    def _refit_layer(
        self,
        module: nn.Module,
        run: Run,
        names: list[str],
        draft_streams: list[Stream],
        targets: list[Stream],
    ) -> None:
        """Fit o_proj or down_proj of a draft layer, so that the residual stream after it comes closer to the source's.

        Args:
            module: The draft layer.
            run: Function that runs the draft layer.
            names: Name of the matrix. For o_proj, also the name of the norm that reads the stream after o_proj.
            draft_streams: The draft's residual streams before the layer.
            targets: The source's residual streams to come close to.
        """

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for stream, target in zip(draft_streams, targets, strict=True):
                features, reached, *_ = _recorded(module, run, stream, *names)
                error = (
                    self._project(target)[0] - reached[0].float()
                ) / self.draft.residual_multiplier
                yield features[0].float(), error

        _fit_matrix(module.get_submodule(names[0]), pairs(), self.fitted, self.refit.ridge)

    def _head(
        self, streams: list[Stream], draft_streams: list[Stream], heldout: list[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        with self.source.head() as (_, source_logits), self.draft.head() as (model, draft_logits):
            self._rescale(model.get_submodule("model.norm"), streams)
            if self.refit.head:

                def pairs() -> Iterator[tuple[Tensor, Tensor]]:
                    for stream, draft_stream in zip(streams, draft_streams, strict=True):
                        features, logits = _recorded(model, draft_logits, draft_stream, "lm_head")
                        error = (
                            source_logits(stream)[0].float() - logits[0].float()
                        ) * self.draft.logits_scaling
                        yield features[0].float(), error

                _fit_matrix(model.get_submodule("lm_head"), pairs(), self.fitted, self.refit.ridge)
            self.draft.round_weights(model)
            rows = zip(streams[self.fitted :], draft_streams[self.fitted :], heldout, strict=True)
            self.agreement = _agreement(
                ((source_logits(s), draft_logits(d), ids) for s, d, ids in rows), self.head_ids
            )
            yield from self.draft.tensors("model.norm")
            if "lm_head.weight" in self.draft.weights:
                yield from self.draft.tensors("lm_head")

    def _project(self, stream: Stream) -> Tensor:
        return stream.float() @ self.basis  # [1, T, D']


def _recorded(module: nn.Module, run: Run, stream: Stream, *names: str) -> list[Tensor]:
    """Run a module on a residual stream. Return the inputs of the named submodules, then the output of the module."""
    inputs: dict[str, Tensor] = {}

    def record(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0]

    with contextlib.ExitStack() as hooks:
        for name in names:
            part = module.get_submodule(name)
            hooks.enter_context(part.register_forward_pre_hook(partial(record, name)))
        output = run(stream)
    return [*(inputs[name] for name in names), output]


@torch.inference_mode()
def _fit_matrix(
    linear: nn.Module, pairs: Iterator[tuple[Tensor, Tensor]], fitted: int, ridge: float
) -> None:
    """Change a weight matrix, so that its outputs come closer to wanted outputs.

    X is the input of the matrix, [T, N], and E the wanted change of its output, [T, M]. The change dW of the weights
    minimises |E - X dW|^2 + ridge m |dW|^2, where m is the mean of the diagonal of X'X. If dW does not lower the error
    on held-out chunks, the weights stay the same.

    Args:
        pairs: X and E of each chunk. The first `fitted` chunks are for the fit, and the others are held out.
        ridge: Penalty, as a multiple of m.
    """
    weight = linear.get_parameter("weight")  # [M, N]
    gram = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
    cross = torch.zeros(weight.shape[1], weight.shape[0], device=weight.device)
    heldout = []
    for index, (x, error) in enumerate(pairs):
        if index < fitted:
            with exact_products():
                gram.addmm_(x.T, x)
                cross.addmm_(x.T, error)
        else:
            heldout.append((x, error))
    with reading(
        "--refit: activations of source or draft are too large for a fit of weights; use --refit norms"
    ):
        change = ridge_solve(gram, cross, ridge).to(weight.device, torch.float32)
    before = sum(float(error.square().sum()) for _, error in heldout)
    after = sum(float((error - x @ change).square().sum()) for x, error in heldout)
    if after < before:
        weight.data.copy_(weight.float() + change.T)


def ridge_solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return the coefficients, [N, M], of a ridge regression from X, [T, N], to E, [T, M], computed in fp64.

    The result is (X'X + ridge mean(diag X'X) I)^-1 X'E. If X is 0, the result is 0.

    gram: X'X, [N, N]. cross: X'E, [N, M].
    """
    gram = exact(gram)
    energy = float(gram.diagonal().mean())
    if energy == 0:
        return torch.zeros_like(cross)
    gram.diagonal().add_(ridge * energy)
    return torch.cholesky_solve(exact(cross), torch.linalg.cholesky(gram))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).add(1e-12).sqrt()


def _agreement(
    rows: Iterator[tuple[Tensor, Tensor, Tensor]], head_ids: list[int] | None
) -> Agreement:
    """Compare the draft, as it is written, with the source by their logits.

    Args:
        rows: For each chunk, the logits of source and draft, [1, T, V] each, and the token ids, [1, T + 1].
        head_ids: Token ids of the draft's trimmed head. None for a complete head.

    Raises:
        UserError: Logits are not finite.
    """
    sums, tokens, predictable = torch.zeros(4, dtype=torch.float64), 0, 0
    for source, draft, ids in rows:
        if head_ids is not None:
            draft = only(draft, torch.tensor(head_ids, device=draft.device))
        log_p, log_q = source[0].float().log_softmax(-1), draft[0].float().log_softmax(-1)
        targets = ids[0, 1:, None].to(log_p.device)
        text_p, text_q = log_p.gather(1, targets), log_q.gather(1, targets)
        inside = text_q > -torch.inf
        terms = [
            -text_p[inside].sum(),
            -text_q[inside].sum(),
            torch.minimum(log_p, log_q).exp().sum(),
            (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
        ]
        sums += torch.stack(terms).cpu()
        tokens += len(targets)
        predictable += int(inside.sum())
    if not sums.isfinite().all():
        raise UserError(
            "the logits of source or draft are not finite on held-out text; use another --source, or --refit none"
        )
    source_ce, draft_ce = (sums[:2] / max(1, predictable)).tolist()
    acceptance, top1 = (sums[2:] / tokens).tolist()
    return Agreement(
        tokens=tokens,
        predictable=predictable,
        source_cross_entropy=source_ce,
        cross_entropy=draft_ce,
        acceptance=acceptance,
        top1=top1,
    )
