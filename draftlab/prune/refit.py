"""What selection alone leaves on the table: source and draft run side by side, one layer of each at a time, and the
draft's output matrices are refitted so that its residual stream follows the source's.

T tokens, D hidden of the source, D' of the draft, N features that enter a matrix, V vocab. Streams are [1, T, D].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftlab.prune.walk import Run, Walk

Stream = Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What to adjust. ridge pulls toward the cut matrix, as a share of the mean energy of a feature."""

    norms: bool = True
    outputs: bool = True
    head: bool = False
    ridge: float = 0.005


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

    Kept layer j of the draft is refitted toward the source's stream just before the next kept layer, so that it also
    stands in for the layers dropped in between.
    """

    def __init__(self, source: Walk, draft: Walk, *, layers: list[int], basis: Tensor, fit: Fit) -> None:
        """layers: those of the source that the draft keeps. basis: [D, D']; x @ basis is x as the draft has it."""
        self.source, self.draft, self.layers, self.fit = source, draft, layers, fit
        self.basis = basis.to(source.device, torch.float32)
        self.agreement: Agreement | None = None  # known once all tensors were yielded

    def tensors(
        self, chunks: list[Tensor], heldout: list[Tensor], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """The draft's tensors, each as it is done, fitted on chunks of token ids [1, T].

        heldout: ids [1, T + 1]; a matrix that does worse on them after its refit keeps its cut weights.
        advance: told how many layers of the source are done.
        """
        self.fitted = len(chunks)
        ids = chunks + [row[:, :-1] for row in heldout]
        streams, followed = self.source.embed(ids), self.draft.embed(ids)
        yield "model.embed_tokens.weight", self.draft.weights["model.embed_tokens.weight"]
        streams = self._source_layers(range(self.layers[0]), streams, advance)
        for j, layer in enumerate(self.layers):
            before = streams
            middle, streams = self._source_layer(layer, before)
            after = self.layers[j + 1] if j + 1 < len(self.layers) else len(self.source.layers)
            streams = self._source_layers(range(layer + 1, after), streams, advance)
            with self.draft.layer(j) as (module, run):
                self._rescale(module.get_submodule("input_layernorm"), before)
                self._rescale(module.get_submodule("post_attention_layernorm"), middle)
                del before
                if self.fit.outputs:
                    self._refit(_Site(module, "self_attn.o_proj", run, "post_attention_layernorm"), followed, middle)
                    self._refit(_Site(module, "mlp.down_proj", run, None), followed, streams)
                followed = [run(stream) for stream in followed]
                advance(after)
                yield from self.draft.tensors(f"model.layers.{j}")
        yield from self._head(streams, followed, heldout)

    def _source_layers(self, layers: range, streams: list[Stream], advance: Callable[[int], None]) -> list[Stream]:
        for layer in layers:
            with self.source.layer(layer) as (_, run):
                streams = [run(stream) for stream in streams]
            advance(layer + 1)
        return streams

    def _source_layer(self, layer: int, streams: list[Stream]) -> tuple[list[Stream], list[Stream]]:
        """Streams between attention and MLP of one source layer, and behind it."""
        with self.source.layer(layer) as (module, run):
            site = _Site(module, "mlp.down_proj", run, "post_attention_layernorm")
            pairs = [site.middle_and_after(stream) for stream in streams]
        return [middle for middle, _ in pairs], [after for _, after in pairs]

    def _rescale(self, norm: nn.Module, streams: list[Stream]) -> None:
        """Make up for the mean square over fewer dimensions: the scale that fits the source's normed stream best."""
        if not self.fit.norms:
            return
        ratios = torch.cat([_rms(self._seen(s)) / _rms(s.float()) for s in streams[: self.fitted]], 1)
        norm.get_parameter("weight").data.mul_(ratios.mean())

    def _refit(self, site: "_Site", followed: list[Stream], wanted: list[Stream]) -> None:
        multiplier = self.draft.residual_multiplier

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for stream, want in zip(followed, wanted, strict=True):
                features, reached = site.features_and_reached(stream)
                yield features, (self._seen(want)[0] - reached) / multiplier

        _fit_matrix(site.linear, pairs(), self.fitted, self.fit.ridge)

    def _head(
        self, streams: list[Stream], followed: list[Stream], heldout: list[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        with self.source.head() as (_, source_logits), self.draft.head() as (model, draft_logits):
            self._rescale(model.get_submodule("model.norm"), streams)
            if self.fit.head:
                site = _Site(model, "lm_head", draft_logits, None)

                def pairs() -> Iterator[tuple[Tensor, Tensor]]:
                    for stream, ours in zip(streams, followed, strict=True):
                        features, reached = site.features_and_reached(ours)
                        error = source_logits(stream)[0].float() - reached
                        yield features, error * self.draft.logits_scaling

                _fit_matrix(site.linear, pairs(), self.fitted, self.fit.ridge)
            logits = zip(streams[self.fitted :], followed[self.fitted :], heldout, strict=True)
            self.agreement = _agreement((source_logits(s), draft_logits(d), ids) for s, d, ids in logits)
            yield from self.draft.tensors("model.norm")
            if "lm_head.weight" in self.draft.weights:
                yield from self.draft.tensors("lm_head")

    def _seen(self, stream: Stream) -> Tensor:
        return stream.float() @ self.basis  # [1, T, D']


@dataclass(frozen=True, slots=True)
class _Site:
    """A matrix inside a running module, and where its output arrives: the input of a norm, or the module's output."""

    module: nn.Module
    name: str
    run: Run
    arrives: str | None

    @property
    def linear(self) -> nn.Module:
        return self.module.get_submodule(self.name)

    def features_and_reached(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """What enters the matrix, [T, N], and the stream where it arrives, [T, D'], both fp32."""
        names = [self.name] + ([self.arrives] if self.arrives else [])
        after, inputs = self._inputs(names, stream)
        reached = inputs[1] if self.arrives else after
        return inputs[0][0].float(), reached[0].float()

    def middle_and_after(self, stream: Stream) -> tuple[Stream, Stream]:
        after, inputs = self._inputs([self.arrives or self.name], stream)
        return inputs[0], after

    def _inputs(self, names: list[str], stream: Stream) -> tuple[Stream, list[Tensor]]:
        seen: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def store(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                seen[name] = args[0]

            return store

        handles = [self.module.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
        try:
            after = self.run(stream)
        finally:
            for handle in handles:
                handle.remove()
        return after, [seen[name] for name in names]


@torch.inference_mode()
def _fit_matrix(linear: nn.Module, pairs: Iterator[tuple[Tensor, Tensor]], fitted: int, ridge: float) -> None:
    """Add to the weight what explains the errors: argmin |E - X dW|^2 + ridge |dW|^2, if held-out error falls.

    pairs: features X [T, N] and errors E [T, M] of each chunk; the first fitted of them are fitted on.
    """
    weight = linear.get_parameter("weight")  # [M, N]
    gram = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
    cross = torch.zeros(weight.shape[1], weight.shape[0], device=weight.device)
    heldout = []
    for index, (x, error) in enumerate(pairs):
        if index < fitted:
            gram.addmm_(x.T, x)
            cross.addmm_(x.T, error)
        else:
            heldout.append((x, error))
    change = ridge_solve(gram, cross, ridge).to(torch.float32)
    before = sum(float(error.square().sum()) for _, error in heldout)
    after = sum(float((error - x @ change).square().sum()) for x, error in heldout)
    if after < before:
        weight.data.copy_(weight.float() + change.T)


def ridge_solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(X'X + ridge mean(diag X'X) I)^-1 X'E in fp64. gram: [N, N]. cross: [N, M]. Zeros where X is zero."""
    gram = gram.double()
    energy = float(gram.diagonal().mean())
    if energy == 0:
        return torch.zeros_like(cross)
    gram.diagonal().add_(ridge * energy)
    return torch.cholesky_solve(cross.double(), torch.linalg.cholesky(gram))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).add(1e-12).sqrt()


def _agreement(rows: Iterator[tuple[Tensor, Tensor, Tensor]]) -> Agreement:
    """rows: logits of the source and of the draft [1, T, V], token ids [1, T + 1]."""
    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    for source, draft, ids in rows:
        log_p, log_q = source[0].float().log_softmax(-1), draft[0].float().log_softmax(-1)
        following = ids[0, 1:, None].to(log_p.device)
        sums += torch.stack(
            [
                -log_p.gather(1, following).sum(),
                -log_q.gather(1, following).sum(),
                torch.minimum(log_p, log_q).exp().sum(),
                (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
            ]
        ).cpu()
        tokens += len(following)
    source_ce, draft_ce, acceptance, top1 = (sums / tokens).tolist()
    return Agreement(
        tokens=tokens, source_cross_entropy=source_ce, cross_entropy=draft_ce, acceptance=acceptance, top1=top1
    )
