"""Refit a draft after the cut, so that its residual stream follows the source's.

Source and draft run side by side, one layer at a time. The matrices that write to the draft's residual stream, o_proj
and down_proj, are fitted by least squares.

Shapes: T tokens, D hidden dimensions of the source, D' of the draft, N inputs and M outputs of a matrix, V vocab.
Residual streams are [1, T, D] in the source and [1, T, D'] in the draft.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.model.devices import add_lower, exact, exact_products
from draftlab.pruning.walk import Run, Walk
from draftlab.reading import reading

Stream = Tensor
MLP_NORM = "post_attention_layernorm"
O_PROJ = "self_attn.o_proj"
DOWN_PROJ = "mlp.down_proj"


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
        streams: Mapping[int, list[Stream]] | None = None,
    ) -> None:
        """Set up the run.

        Args:
            layers: Layers of the source that the draft keeps.
            basis: Map from the source's residual stream to the draft's, [D, D'].
            head_ids: Token ids of the draft's trimmed head. None for a complete head.
            streams: Residual streams of the source that are known (see Calibration), for the chunks and the held-out
                text of tensors(). The source computes the others.
        """
        self.source = source
        self.draft = draft
        self.layers = layers
        self.refit = refit
        self.basis = basis.to(source.device, torch.float32)
        self.kept_whole = torch.equal(basis, torch.eye(len(basis)))  # the stream is not cut
        self.head_ids = head_ids
        self.known = dict(streams or {})
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
        streams = self.known.pop(0) if 0 in self.known else self.source.embed(ids)
        draft_streams = self.draft.embed(ids)
        yield "model.embed_tokens.weight", self.draft.weights["model.embed_tokens.weight"]
        streams = self._run_layers(0, self.layers[0], streams, advance)
        for j, layer in enumerate(self.layers):
            before = streams
            after = self.layers[j + 1] if j + 1 < len(self.layers) else len(self.source.layers)
            with (
                self.source.layer(layer) as (module, run),
                # where the streams after the layer are known, the MLP need not run
                _returning(module, "mlp", torch.zeros_like, after in self.known),
            ):
                pairs = [_recorded(module, run, stream, MLP_NORM) for stream in before]
            middle = [pair[0] for pair in pairs]
            streams = [pair[1] for pair in pairs]
            del pairs
            streams = self._run_layers(layer + 1, after, streams, advance)
            with self.draft.layer(j) as (module, run):
                self._rescale(module.get_submodule("input_layernorm"), before)
                self._rescale(module.get_submodule(MLP_NORM), middle)
                del before
                self.draft.round_weights(module)
                if self.refit.layers:
                    draft_streams = self._refit_layer(module, run, draft_streams, middle, streams)
                else:
                    draft_streams = [run(stream) for stream in draft_streams]
                advance(after)
                yield from self.draft.tensors(f"model.layers.{j}")
        yield from self._head(streams, draft_streams, heldout)

    def _run_layers(self, first: int, end: int, streams: list[Stream], advance: Callable[[int], None]) -> list[Stream]:
        """Return the source's residual streams before layer `end`, from the streams before layer `first`."""
        if end in self.known:
            return self.known.pop(end)
        for layer in range(first, end):
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
        ratios = torch.cat([_rms(self._project(s)) / _rms(s.float()) for s in streams[: self.fitted]], 1)
        if not ratios.mean().isfinite():
            raise UserError(
                "--refit: the residual stream of the source is not finite on this text; use another --source or --data"
            )
        norm.get_parameter("weight").data.mul_(ratios.mean())

    def _refit_layer(
        self,
        module: nn.Module,
        run: Run,
        draft_streams: list[Stream],
        middle: list[Stream],
        targets: list[Stream],
    ) -> list[Stream]:
        """Fit o_proj, then down_proj of a draft layer, so that its residual stream comes closer to the source's.

        Each other matrix of the layer multiplies the text once. Passes after a fit repeat what is before the matrix.

        Args:
            module: The draft layer.
            run: Function that runs the draft layer.
            draft_streams: The draft's residual streams before the layer.
            middle: The source's residual streams to come close to after o_proj.
            targets: The source's residual streams to come close to after the layer.

        Returns: The draft's residual streams after the layer.
        """
        o, down = (module.get_submodule(name) for name in (O_PROJ, DOWN_PROJ))
        with _returning(module, "mlp", torch.zeros_like):
            reached = [_recorded(module, run, s, O_PROJ, MLP_NORM)[:2] for s in draft_streams]
        heads = [x for x, _ in reached]
        self._fit(o, reached, middle)
        reached = []
        for stream, x in zip(draft_streams, heads, strict=True):
            with _returning(module, "self_attn", lambda x=x, **_: (o(x), None)):
                reached.append(_recorded(module, run, stream, DOWN_PROJ))
        self._fit(down, reached, targets)
        after: list[Stream] = []
        for stream, x, (neurons, _) in zip(draft_streams, heads, reached, strict=True):
            with (
                _returning(module, "self_attn", lambda x=x, **_: (o(x), None)),
                _returning(module, "mlp", lambda _, x=neurons: down(x)),
            ):
                after.append(run(stream))
        return after

    def _fit(self, linear: nn.Module, reached: list[list[Tensor]], targets: list[Stream]) -> None:
        """Fit a matrix, and round it to the dtype in which it is written.

        Args:
            reached: The input of the matrix and the residual stream after it, [1, T, N] and [1, T, D'] for each chunk.
            targets: The source's residual streams to come close to.
        """

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for (features, stream), target in zip(reached, targets, strict=True):
                error = self._project(target)[0] - stream[0].float()
                yield features[0].float(), error / self.draft.residual_multiplier

        _fit_matrix(linear, pairs(), self.fitted, self.refit.ridge)
        self.draft.round_weights(linear)

    def _head(
        self, streams: list[Stream], draft_streams: list[Stream], heldout: list[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        with self.source.head() as (_, source_logits), self.draft.head() as (model, draft_logits):
            self._rescale(model.get_submodule("model.norm"), streams)
            with _trimmed(model.get_submodule("lm_head"), self.head_ids):
                if self.refit.head:
                    self._refit_head(model, source_logits, draft_logits, streams, draft_streams)
                self.draft.round_weights(model)
                rows = zip(streams[self.fitted :], draft_streams[self.fitted :], heldout, strict=True)
                self.agreement = _agreement(
                    ((source_logits(s), draft_logits(d), ids) for s, d, ids in rows), self.head_ids
                )
            yield from self.draft.tensors("model.norm")
            if "lm_head.weight" in self.draft.weights:
                yield from self.draft.tensors("lm_head")

    def _refit_head(
        self,
        model: nn.Module,
        source_logits: Run,
        draft_logits: Run,
        streams: list[Stream],
        draft_streams: list[Stream],
    ) -> None:
        ids = slice(None) if self.head_ids is None else self.head_ids

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for stream, draft_stream in zip(streams, draft_streams, strict=True):
                features, logits = _recorded(model, draft_logits, draft_stream, "lm_head")
                error = source_logits(stream)[0][:, ids].float() - logits[0].float()
                yield features[0].float(), error * self.draft.logits_scaling

        _fit_matrix(model.get_submodule("lm_head"), pairs(), self.fitted, self.refit.ridge)

    def _project(self, stream: Stream) -> Tensor:
        # [1, T, D']
        return stream.float() if self.kept_whole else stream.float() @ self.basis


@contextlib.contextmanager
def _returning(layer: nn.Module, name: str, output: Callable[..., object], applies: bool = True) -> Iterator[None]:
    """Replace the forward pass of a submodule of a layer by a function inside the `with` block, if `applies`."""
    part = layer.get_submodule(name)
    if applies:
        part.forward = output
    try:
        yield
    finally:
        if applies:
            del part.forward


@contextlib.contextmanager
def _trimmed(head: nn.Module, ids: list[int] | None) -> Iterator[None]:
    """Reduce a loaded head to the rows of a trimmed head inside the `with` block. None leaves the head as it is."""
    if ids is None:
        yield
        return
    whole = head.get_parameter("weight")
    head.weight = nn.Parameter(whole[ids], requires_grad=False)
    yield
    with torch.inference_mode():
        whole[ids] = head.get_parameter("weight")
    head.weight = whole


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
def _fit_matrix(linear: nn.Module, pairs: Iterator[tuple[Tensor, Tensor]], fitted: int, ridge: float) -> None:
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
            add_lower(gram, x.T, x)
            with exact_products():
                cross.addmm_(x.T, error)
        else:
            heldout.append((x, error))
    with reading("--refit: activations of source or draft are too large for a fit of weights; use --refit norms"):
        change = ridge_solve(gram, cross, ridge).to(weight.device, torch.float32)
    before = sum(float(error.square().sum()) for _, error in heldout)
    after = sum(float((error - x @ change).square().sum()) for x, error in heldout)
    if after < before:
        weight.data.copy_(weight.float() + change.T)


def ridge_solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return the coefficients, [N, M], of a ridge regression from X, [T, N], to E, [T, M], computed in fp64.

    The result is (X'X + ridge mean(diag X'X) I)^-1 X'E. If X is 0, the result is 0.

    gram: X'X, [N, N], of which only the lower triangle is read. cross: X'E, [N, M].
    """
    gram = exact(gram)
    energy = float(gram.diagonal().mean())
    if energy == 0:
        return torch.zeros_like(cross)
    gram.diagonal().add_(ridge * energy)
    return torch.cholesky_solve(exact(cross), torch.linalg.cholesky(gram))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).add(1e-12).sqrt()


def _agreement(rows: Iterator[tuple[Tensor, Tensor, Tensor]], head_ids: list[int] | None) -> Agreement:
    """Compare the draft, as it is written, with the source by their logits.

    Args:
        rows: For each chunk, the logits of the source, [1, T, V], those of the draft, and the token ids, [1, T + 1].
        head_ids: Token ids of the draft's logits, [1, T, S], if its head is trimmed. None for a complete head.

    Raises:
        UserError: Logits are not finite.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    predictable = 0
    for source, draft, ids in rows:
        logits = source[0].float()
        log_q = draft[0].float().log_softmax(-1)
        total = logits.logsumexp(-1, keepdim=True)
        top = logits.argmax(-1)
        targets = ids[0, 1:].to(logits.device)  # [S]
        of_column = torch.arange(logits.shape[1])
        text_p = logits.gather(1, targets.unsqueeze(1)) - total
        if head_ids is not None:
            of_column = torch.tensor(head_ids)
            logits = logits[:, head_ids]
        of_column = of_column.to(logits.device)
        log_p = logits - total
        column = torch.searchsorted(of_column, targets).clamp_max(len(of_column) - 1)
        inside = of_column[column] == targets
        text_q = log_q.gather(1, column.unsqueeze(1))
        terms = [
            -text_p[inside].sum(),
            -text_q[inside].sum(),
            torch.minimum(log_p, log_q).exp().sum(),
            (top == of_column[log_q.argmax(-1)]).sum(),
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
