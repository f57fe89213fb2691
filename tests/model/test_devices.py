"""Arithmetic stays on the accelerator it is for, in dtypes that it has, in few launches: by fake tensors of devices."""

import numpy as np
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from builders import build
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab.data import Batch
from draftlab.engine import verify
from draftlab.model.devices import exact, exact_dtype, exact_products
from draftlab.model.shape import Shape
from draftlab.pruning.importance import _Sums
from draftlab.training import fused_loss as fused
from draftlab.training.fused_loss import Dense, fused_loss
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep
from draftlab.training.teachers import LocalTeacher

META = torch.device("meta")
SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=100)


class Counted(TorchDispatchMode):
    """Counts operations that a device launches: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        free = func.is_view or func._schema.name.startswith(
            ("aten::empty", "aten::detach", "aten::_unsafe_view")
        )
        self.count += not free
        return func(*args, **(kwargs or {}))


def launches(vocab: int, tokens: int = 4096) -> int:
    """Count the operations of a distillation step's loss in bfloat16 on a device that is no CPU."""

    def empty(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, device=META, dtype=torch.bfloat16)

    hidden, head = empty(tokens, 2048).requires_grad_(), empty(vocab, 2048).requires_grad_()
    labels, weights = (
        torch.zeros(tokens, dtype=torch.long, device=META),
        torch.ones(tokens, device=META),
    )
    teacher = Dense(empty(tokens, 4096), empty(vocab, 4096))
    with Counted() as launched:
        fused_loss(
            hidden, head, labels, weights, teacher, parse_loss("fkl"), 1.0
        ).objective.backward()
    assert head.grad is not None
    return launched.count


@pytest.mark.parametrize(("vocab", "most"), [(32_000, 400), (128_256, 1500)])
def test_a_fused_loss_is_few_launches_on_an_accelerator(vocab, most):
    """Pieces that suit a CPU were 2,164 and 26,692 launches, of 5 microseconds each, beside 25 ms of arithmetic."""
    assert launches(vocab) < most


def test_calibration_sums_stay_where_the_tokens_are():
    """Nothing can be copied from a device without memory."""
    sums, layer = _Sums(SHAPE, META), Layer()
    with torch.no_grad():
        for module, listener in sums.listeners(layer, 1):
            width = (
                SHAPE.ffn
                if isinstance(module, nn.Linear) and module.in_features == SHAPE.ffn
                else SHAPE.hidden
            )
            x = torch.empty(1, 9, width, device=META, dtype=torch.bfloat16)
            listener(x, x)
        sums.weigh(layer, 1)
    assert {part.device.type for part in (sums.hidden, sums.covariance, sums.heads, sums.ffn)} == {
        "meta"
    }


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = self.post_attention_layernorm = nn.Identity()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.o_proj = nn.Linear(SHAPE.hidden, SHAPE.hidden, bias=False, device=META)
        self.mlp.down_proj = nn.Linear(SHAPE.ffn, SHAPE.hidden, bias=False, device=META)


class Watched(TorchDispatchMode):
    """Records the dtypes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.dtypes |= {result.dtype} if isinstance(result, Tensor) else set()
        return result


def test_apples_gpus_have_no_float64(monkeypatch):
    mps = torch.device("mps")
    assert exact_dtype(mps) == torch.float32
    assert exact_dtype(torch.device("cpu")) == exact_dtype(torch.device("cuda")) == torch.float64
    for module in (verify, fused):
        monkeypatch.setattr(module, "exact_dtype", lambda device: exact_dtype(mps))
    with Watched() as watch:
        verify.draw(torch.full((2, 9), 1 / 9), torch.rand(2))
        labels, weights = torch.zeros(4, dtype=torch.long), torch.ones(4)
        fused.fused_loss(torch.randn(4, 9), None, labels, weights, None, parse_loss("ce"), 1.0)
    assert torch.float64 not in watch.dtypes


def test_exact_values_are_computed_where_there_is_float64():
    assert exact(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float64
    on_gpu = exact(torch.empty(2, device=META))
    assert (on_gpu.dtype, on_gpu.device) == (torch.float64, META)


def test_the_head_of_a_spread_teacher_is_copied_once():
    teacher = LocalTeacher(build("llama"), 300, META)
    batch = Batch(np.arange(3, 13, dtype=np.int64)[None], np.ones((1, 9)))
    first, again = teacher.distributions(batch), teacher.distributions(batch)
    assert first.head is again.head
    assert first.head is not None
    assert first.head.device == META


def test_products_of_normal_equations_are_no_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_fsdp2_shards_a_student_layer_by_layer():
    step = DistillStep(build("qwen3"), parse_loss("ce"), 1.0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    policy = fsdp2_prepare_auto_wrap_policy(plugin, step)
    assert policy is not None
    assert sum(policy(module) for module in step.modules()) == 5
