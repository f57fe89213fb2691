"""Initial weights of an EAGLE-3 head, fitted by least squares to predict the target's next state.

A head with random weights spends most of a short run on learning a linear map, which least squares gives at once. Let
u(i) be the input of the target's lm_head at position i, with each feature divided by its root mean square. These are
the initial weights:

* The norms before fc give the inputs of fc a mean square of 1.
* fc is the best linear map from the states of the A layers to u(i).
* q_proj and k_proj let a position attend only to itself, in one query head of each kv head.
* v_proj and o_proj are the best map of rank R from the output of fc and the next token's embedding to u(i + 1) minus
  the output of fc.
* The output of the MLP is 0.
* The last norm has the scale of each feature that fits the target's states best.
* lm_head has the target's weights.

If the head has norm_output, it reads back states with the scale of the target's states. fc and attention therefore
write states of this scale, and hidden_norm divides by it.

Shapes: N tokens, D hidden of the head, E hidden of the target (E = D here), A layers of the target that the head reads,
R rank of the values, I inputs and O outputs of a regression.
"""

from typing import cast

import torch
from torch import Tensor

from draftlab.heads.eagle3.module import EagleHead, Layer
from draftlab.heads.training import Sample
from draftlab.model.devices import exact
from draftlab.model.llama import rms_norm

RIDGE = 1e-2  # ridge penalty, as a share of the mean square of the features
# attention score of a position with itself; its scores with other positions are about N(0, 1)
OWN = 12.0


@torch.no_grad()
def start_linear(student: EagleHead, sampled: Sample) -> None:
    """Set the initial weights of a new head, except lm_head, so that the head predicts the target's next state.

    The weights are fitted by least squares to `sampled`, which has pairs of positions of the training text.
    """
    layer = cast(Layer, student.layers[0])
    c = student.config
    unit = sampled.now.pow(2).mean(0).sqrt()
    now = sampled.now / unit
    after = sampled.after / unit
    _measure_scale(student, sampled)
    features = student.features(sampled.states) if student.norms_before_fc else sampled.states
    fc = ridge(features, now)
    state = features @ fc
    ones = torch.ones_like(unit)
    size = unit if c.norm_output else ones  # scale of the fed-back state, in units of u
    embedded, normed = (rms_norm(x, ones, c.eps) for x in (sampled.embedded, state * size))
    hidden_norm = 1 / (normed / size).pow(2).mean().sqrt() / size
    normed = normed * hidden_norm if c.norm_output else normed
    inputs = torch.cat([embedded, normed], -1)
    change = ridge(inputs, after - state)
    values = c.kv_heads * c.head_dim
    predicted = inputs @ change
    basis = torch.linalg.eigh(predicted.T @ predicted).eigenvectors.flip(1)[:, :values]  # [D, R]
    attention = layer.self_attn
    own = torch.arange(0, c.heads, c.heads // c.kv_heads)  # one query head for each value head
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
    _look_at_own_position(attention.q_proj.weight, attention.k_proj.weight, own, embedded, c.head_dim)


@torch.no_grad()
def start_again(student: EagleHead, sampled: Sample) -> None:
    """Set `scale` of a trained head so that the inputs of fc have mean square 1.

    fc.weight is multiplied by `scale`, so the head's outputs stay the same. A head with norms before fc is not changed.
    """
    if not student.norms_before_fc:
        _measure_scale(student, sampled)
        student.fc.weight.mul_(student.scale)


def _measure_scale(student: EagleHead, sampled: Sample) -> None:
    """Give the inputs of fc a mean square of 1. Change the norms before fc or, without norms, the head's `scale`."""
    size = student.features(sampled.states).pow(2).mean(0).sqrt().clamp_min(student.config.eps)
    norms = student.norms_before_fc
    if not norms:
        student.scale.mul_(size)
        return
    for norm, part in zip(norms, size.chunk(len(norms)), strict=True):
        norm.get_parameter("weight").div_(part)


def _look_at_own_position(q: Tensor, k: Tensor, own: Tensor, embedded: Tensor, size: int) -> None:
    """Make one query head of each kv head attend only to its own position.

    Query and key become the same linear map of a token's embedding, so a token's score with itself is the highest.

    Args:
        q, k: Weights of q_proj and k_proj.
        own: Index of the query head for each kv head.
        embedded: Token embeddings after the norm, [N, D].
        size: head_dim.
    """
    hidden = embedded.shape[1]
    mean = torch.nn.functional.normalize(embedded.mean(0), dim=0)
    queries, keys = (weight.unflatten(0, (-1, size)) for weight in (q, k.zero_()))
    for number, head in enumerate(own.tolist()):
        random = torch.randn(hidden, size).to(k)
        # the mean of all embeddings is left out, because it does not distinguish positions
        random -= torch.outer(mean, mean @ random)
        directions = torch.linalg.qr(random).Q.T if size <= hidden else random.T * hidden**-0.5
        directions = directions * (OWN * size**0.5 / (embedded @ directions.T).pow(2).sum(-1).mean()) ** 0.5
        keys[number, :, :hidden] = directions
        queries[head] = 0
        queries[head, :, :hidden] = directions


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """Return the coefficients, [I, O], of a ridge regression from x, [N, I], to y, [N, O]. fp64 is used to solve it."""
    x = exact(x)
    outputs = exact(y)
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.T @ outputs).to(y)
