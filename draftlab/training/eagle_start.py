"""The start of an EAGLE-3 head's training: a linear prediction of the target's next state, by least squares.

N tokens, D hidden, E hidden of the target (D = E here), A layers read, R rank of the values, C size of a head.

With random weights a head spends most of a short run on what linear algebra knows. Let u(i) be what the target's output
layer reads at position i, in units of its own sizes. fc starts as the best linear map of the layers' states to u(i).
Attention starts by looking at its own position, and v and o as the best map, of rank R, of that state and of the next
token's embedding to u(i + 1) - u(i). The MLP adds nothing yet, the norm's weight gives the output its size, the smaller
the less of u(i + 1) is predicted, and lm_head is the target's.

With norms before fc, their weights start as the units of what fc reads. With norm_output the state that is fed back has
the target's own sizes, so fc and attention write these, and hidden_norm divides by them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftlab.console import Advance
from draftlab.data import Batch
from draftlab.model.devices import exact
from draftlab.model.llama import rms_norm
from draftlab.training.eagle_head import EagleHead, EagleTeacher, Layer

RIDGE = 1e-2  # share of the mean square of a feature
OWN = 12.0  # attention score of a position with itself; those of other tokens are about normal
LARGE = 8.0  # times the median norm: states that sum up the text before, as a first token's, which no map should fit


@dataclass(frozen=True, slots=True)
class Sample:
    """states: at positions i, [N, A E]. embedded: the tokens at i + 1, [N, E]. now, after: Inputs of the target's
    output layer at i and i + 1, [N, E].
    """

    states: Tensor
    embedded: Tensor
    now: Tensor
    after: Tensor


@torch.no_grad()
def sample(teacher: EagleTeacher, batches: Iterable[Batch], advance: Advance) -> Sample:
    """Run the target on batches, and return all pairs of neighbours in their texts, but for outlying states."""
    parts: list[list[Tensor]] = []
    for number, batch in enumerate(batches):
        advance(number, "batches")
        ids = torch.from_numpy(batch.ids[:, : int(batch.lengths.max()) + 1]).to(teacher.device)
        states, read = teacher.states_of(ids)
        lengths = torch.from_numpy(batch.lengths).to(ids.device)
        inside = torch.arange(ids.shape[1] - 1, device=ids.device) + 1 < lengths.unsqueeze(1)
        size = states[:, :-1].float().norm(dim=-1)
        inside &= size < LARGE * size.median()
        embedded = teacher.embedding[ids[:, 1:]]
        whole = (states[:, :-1], embedded, read[:, :-1], read[:, 1:])
        parts.append([tensor[inside].float() for tensor in whole])
    return Sample(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@torch.no_grad()
def start_linear(student: EagleHead, sampled: Sample) -> None:
    """Set the student's weights by least squares."""
    layer, c = cast(Layer, student.layers[0]), student.config
    unit = sampled.now.pow(2).mean(0).sqrt()
    now, after = sampled.now / unit, sampled.after / unit
    _measure_scale(student, sampled)
    features = student.features(sampled.states) if student.reads_normed else sampled.states
    fc = ridge(features, now)
    state, ones = features @ fc, torch.ones_like(unit)
    size = unit if c.norm_output else ones  # scale of the state, in present units
    embedded, normed = (rms_norm(x, ones, c.eps) for x in (sampled.embedded, state * size))
    hidden_norm = 1 / (normed / size).pow(2).mean().sqrt() / size
    normed = normed * hidden_norm if c.norm_output else normed
    inputs = torch.cat([embedded, normed], -1)
    change = ridge(inputs, after - state)
    values = c.kv_heads * c.head_dim
    predicted = inputs @ change
    basis = torch.linalg.eigh(predicted.T @ predicted).eigenvectors.flip(1)[:, :values]  # [D, R]
    attention, own = (
        layer.self_attn,
        torch.arange(0, c.heads, c.heads // c.kv_heads),
    )  # one head for each value
    student.fc.weight.copy_(fc.T * student.scale * size.unsqueeze(1))
    if c.norm_output:
        layer.hidden_norm.weight.copy_(hidden_norm)
    output = rms_norm((state + predicted @ basis @ basis.T) * size, ones, c.eps)
    student.norm.weight.copy_((output * sampled.after).sum(0) / output.pow(2).sum(0))
    layer.mlp.down_proj.weight.zero_()
    attention.v_proj.weight.zero_()[: basis.shape[1]] = (change @ basis).T
    out = attention.o_proj.weight.zero_().unflatten(1, (c.heads, c.head_dim))
    padded = torch.nn.functional.pad(basis * size.unsqueeze(1), (0, values - basis.shape[1]))
    out[:, own] = padded.unflatten(1, (c.kv_heads, c.head_dim))
    _look_at_own_position(
        attention.q_proj.weight, attention.k_proj.weight, own, embedded, c.head_dim
    )


@torch.no_grad()
def start_again(student: EagleHead, sampled: Sample) -> None:
    """Let fc of a student with another head's weights read states in units of their own sizes; it computes the same."""
    if not student.reads_normed:
        _measure_scale(student, sampled)
        student.fc.weight.mul_(student.scale)


def _measure_scale(student: EagleHead, sampled: Sample) -> None:
    """Let fc read features of mean square 1: by the weights of the norms before it, or by the student's scale."""
    size = student.features(sampled.states).pow(2).mean(0).sqrt().clamp_min(student.config.eps)
    if student.input_norm is not None:
        student.input_norm.weight.div_(size)
    elif student.fc_norm is None:
        student.scale.mul_(size)
    else:
        for norm, part in zip(student.fc_norm, size.chunk(len(student.fc_norm)), strict=True):
            cast(LlamaRMSNorm, norm).weight.div_(part)


def _look_at_own_position(q: Tensor, k: Tensor, own: Tensor, embedded: Tensor, size: int) -> None:
    """Let queries and keys of a head for each value be the same product of the token's embedding."""
    hidden = embedded.shape[1]
    mean = torch.nn.functional.normalize(embedded.mean(0), dim=0)
    k.zero_()
    for number, head in enumerate(own.tolist()):
        random = torch.randn(hidden, size).to(k)
        # the mean of all embeddings tells no position from another
        random -= torch.outer(mean, mean @ random)
        directions = torch.linalg.qr(random).Q.T if size <= hidden else random.T * hidden**-0.5
        directions = (
            directions * (OWN * size**0.5 / (embedded @ directions.T).pow(2).sum(-1).mean()) ** 0.5
        )
        k[number * size : (number + 1) * size, :hidden] = directions
        q[head * size : (head + 1) * size] = 0
        q[head * size : (head + 1) * size, :hidden] = directions


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """Return the map [I, O] from x [N, I] to y [N, O] with the least squares, in fp64."""
    x, outputs = exact(x), exact(y)
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.T @ outputs).to(y)
