"""The refit after a cut: source and draft run side by side, layer by layer, and each output matrix of the draft is
fitted so that its residual stream follows the source's.

T tokens, D hidden of the source, D' of the draft, N input features of a matrix, V vocab. Streams are [1, T, D].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftlab.model.devices import exact, exact_products
from draftlab.model.trimmed_head import only
from draftlab.pruning.walk import Run, Walk

Stream = Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Adjustments after the cut that make the draft follow the source.

    norms: scale them to the smaller width. layers: fit o_proj and down_proj to the source's residual stream. head: fit
    lm_head to the source's logits. ridge: pull of the fits toward the cut weights.
    """

    norms: bool = True
    layers: bool = True
    head: bool = False
    ridge: float = 0.005

    @property
    def fits(self) -> bool:
        """Return whether the adjustments depend on text."""
        return self.norms or self.layers or self.head


REFITS = {
    "none": Refit(norms=False, layers=False),
    "norms": Refit(layers=False),
    "layers": Refit(),
    "head": Refit(head=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Draft against source on held-out tokens, teacher-forced. acceptance: mean of sum min(p, q)."""

    tokens: int
    source_cross_entropy: float
    cross_entropy: float
    acceptance: float
    top1: float


class Lockstep:
    """Source and draft over the same text.

    Layer j of the draft is refitted to the source's stream just before the next kept layer, so that it also stands in
    for the layers dropped in between.
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
        """Set up both.

        layers: kept layers of the source. basis: [D, D'], maps the source's stream to the draft's. head_ids: those of a
        trimmed head.
        """
        self.source, self.draft, self.layers, self.refit = source, draft, layers, refit
        self.basis = basis.to(source.device, torch.float32)
        self.head_ids = head_ids
        self.agreement: Agreement | None = None  # set once all tensors were yielded

    def tensors(
        self, chunks: list[Tensor], heldout: list[Tensor], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the draft's tensors, fitted on chunks of token ids [1, T].

        heldout: ids [1, T + 1]; a matrix whose refit does worse on them keeps its cut weights. advance: called with
        the number of source layers done.
        """
        self.fitted = len(chunks)
        ids = chunks + [row[:, :-1] for row in heldout]
        streams, draft_streams = self.source.embed(ids), self.draft.embed(ids)
        yield "model.embed_tokens.weight", self.draft.weights["model.embed_tokens.weight"]
        streams = self._run_layers(range(self.layers[0]), streams, advance)
        for j, layer in enumerate(self.layers):
            before = streams
            middle, streams = self._run_layer(layer, before)
            after = self.layers[j + 1] if j + 1 < len(self.layers) else len(self.source.layers)
            streams = self._run_layers(range(layer + 1, after), streams, advance)
            with self.draft.layer(j) as (module, run):
                self._rescale(module.get_submodule("input_layernorm"), before)
                self._rescale(module.get_submodule("post_attention_layernorm"), middle)
                del before
                if self.refit.layers:
                    attention = _Site(module, "self_attn.o_proj", run, "post_attention_layernorm")
                    self._refit(attention, draft_streams, middle)
                    self._refit(_Site(module, "mlp.down_proj", run, None), draft_streams, streams)
                draft_streams = [run(stream) for stream in draft_streams]
                advance(after)
                yield from self.draft.tensors(f"model.layers.{j}")
        yield from self._head(streams, draft_streams, heldout)

    def _run_layers(self, layers: range, streams: list[Stream], advance: Callable[[int], None]) -> list[Stream]:
        for layer in layers:
            with self.source.layer(layer) as (_, run):
                streams = [run(stream) for stream in streams]
            advance(layer + 1)
        return streams

    def _run_layer(self, layer: int, streams: list[Stream]) -> tuple[list[Stream], list[Stream]]:
        """Return the streams between attention and MLP of one source layer, and after it."""
        with self.source.layer(layer) as (module, run):
            site = _Site(module, "mlp.down_proj", run, "post_attention_layernorm")
            pairs = [site.middle_and_after(stream) for stream in streams]
        return [middle for middle, _ in pairs], [after for _, after in pairs]

    def _rescale(self, norm: nn.Module, streams: list[Stream]) -> None:
        """Correct for the mean square over fewer dimensions: scale to the source's normed stream."""
        if not self.refit.norms:
            return
        ratios = torch.cat([_rms(self._project(s)) / _rms(s.float()) for s in streams[: self.fitted]], 1)
        norm.get_parameter("weight").data.mul_(ratios.mean())

    def _refit(self, site: "_Site", draft_streams: list[Stream], targets: list[Stream]) -> None:
        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for stream, target in zip(draft_streams, targets, strict=True):
                features, reached = site.features_and_output(stream)
                yield features, (self._project(target)[0] - reached) / self.draft.residual_multiplier

        _fit_matrix(site.linear, pairs(), self.fitted, self.refit.ridge)

    def _head(
        self, streams: list[Stream], draft_streams: list[Stream], heldout: list[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        with self.source.head() as (_, source_logits), self.draft.head() as (model, draft_logits):
            self._rescale(model.get_submodule("model.norm"), streams)
            if self.refit.head:
                site = _Site(model, "lm_head", draft_logits, None)

                def pairs() -> Iterator[tuple[Tensor, Tensor]]:
                    for stream, draft_stream in zip(streams, draft_streams, strict=True):
                        features, logits = site.features_and_output(draft_stream)
                        yield features, (source_logits(stream)[0].float() - logits) * self.draft.logits_scaling

                _fit_matrix(site.linear, pairs(), self.fitted, self.refit.ridge)
            rows = zip(streams[self.fitted :], draft_streams[self.fitted :], heldout, strict=True)
            self.agreement = _agreement(((source_logits(s), draft_logits(d), ids) for s, d, ids in rows), self.head_ids)
            yield from self.draft.tensors("model.norm")
            if "lm_head.weight" in self.draft.weights:
                yield from self.draft.tensors("lm_head")

    def _project(self, stream: Stream) -> Tensor:
        return stream.float() @ self.basis  # [1, T, D']


@dataclass(frozen=True, slots=True)
class _Site:
    """A matrix inside a running module. output: the norm that reads the stream it adds to, or the module's output."""

    module: nn.Module
    name: str
    run: Run
    output: str | None

    @property
    def linear(self) -> nn.Module:
        return self.module.get_submodule(self.name)

    def features_and_output(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the input of the matrix, [T, N], and the stream it adds to, [T, D'], both fp32."""
        names = [self.name] + ([self.output] if self.output else [])
        after, inputs = self._inputs(names, stream)
        output = inputs[1] if self.output else after
        return inputs[0][0].float(), output[0].float()

    def middle_and_after(self, stream: Stream) -> tuple[Stream, Stream]:
        after, inputs = self._inputs([self.output or self.name], stream)
        return inputs[0], after

    def _inputs(self, names: list[str], stream: Stream) -> tuple[Stream, list[Tensor]]:
        """Run the module; return its output and the inputs of the named submodules."""
        inputs: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            return lambda _, args: inputs.update({name: args[0]})

        handles = [self.module.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
        try:
            after = self.run(stream)
        finally:
            for handle in handles:
                handle.remove()
        return after, [inputs[name] for name in names]


@torch.inference_mode()
def _fit_matrix(linear: nn.Module, pairs: Iterator[tuple[Tensor, Tensor]], fitted: int, ridge: float) -> None:
    """Add to the weight argmin |E - X dW|^2 + ridge |dW|^2, if that lowers the held-out error.

    pairs: features X [T, N] and errors E [T, M] of each chunk; the first fitted ones are fitted on.
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
    change = ridge_solve(gram, cross, ridge).to(weight.device, torch.float32)
    before = sum(float(error.square().sum()) for _, error in heldout)
    after = sum(float((error - x @ change).square().sum()) for x, error in heldout)
    if after < before:
        weight.data.copy_(weight.float() + change.T)


def ridge_solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return (X'X + ridge mean(diag X'X) I)^-1 X'E in fp64; zeros if X is zero. gram: [N, N]. cross: [N, M]."""
    gram = exact(gram)
    energy = float(gram.diagonal().mean())
    if energy == 0:
        return torch.zeros_like(cross)
    gram.diagonal().add_(ridge * energy)
    return torch.cholesky_solve(exact(cross), torch.linalg.cholesky(gram))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).add(1e-12).sqrt()


def _agreement(rows: Iterator[tuple[Tensor, Tensor, Tensor]], head_ids: list[int] | None) -> Agreement:
    """rows: logits of the source and of the draft [1, T, V], token ids [1, T + 1].

    A head that lacks a token has no cross-entropy there, and agrees nowhere on it.
    """
    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    for source, draft, ids in rows:
        if head_ids is not None:
            draft = only(draft, torch.tensor(head_ids, device=draft.device))
        log_p, log_q = source[0].float().log_softmax(-1), draft[0].float().log_softmax(-1)
        targets = ids[0, 1:, None].to(log_p.device)
        terms = [
            -log_p.gather(1, targets).sum(),
            (-log_q.gather(1, targets)).nan_to_num(posinf=0).sum(),
            torch.minimum(log_p, log_q).exp().sum(),
            (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
        ]
        sums += torch.stack(terms).cpu()
        tokens += len(targets)
    source_ce, draft_ce, acceptance, top1 = (sums / tokens).tolist()
    return Agreement(
        tokens=tokens, source_cross_entropy=source_ce, cross_entropy=draft_ce, acceptance=acceptance, top1=top1
    )
