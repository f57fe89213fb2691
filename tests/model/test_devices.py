"""Arithmetic stays on the accelerator it is for, in dtypes that it has, in few launches: by fake tensors of devices."""

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from helpers.builders import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab.engine import verify
from draftlab.model.devices import exact_dtype
from draftlab.training import fused_loss as fused
from draftlab.training.losses import parse_loss
from draftlab.training.objectives import DistillStep


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


def test_fsdp2_shards_a_student_layer_by_layer():
    step = DistillStep(build("qwen3"), parse_loss("ce"), 1.0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    policy = fsdp2_prepare_auto_wrap_policy(plugin, step)
    assert policy is not None
    assert sum(policy(module) for module in step.modules()) == 5
