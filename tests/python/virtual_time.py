"""Training in virtual time: each op costs the simulated GPU by the size of what it makes."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagehand_alloc.testing import SimulatedGpu

_NS_PER_BYTE = 0.02  # 50 GB/s: slow, so that small tensors cost something
_LAUNCH_NS = 2000
_MATMUL = 8  # times as much


class VirtualTime(TorchDispatchMode):
    """A `with` inside which ops of torch move the simulated clock."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._sim: Any = gpu._sim
        self._sim.stagehand_sim_advance_ns.argtypes = [ctypes.c_uint64]
        self._sim.stagehand_sim_advance_ns.restype = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [one.nbytes for one in pytree.tree_leaves(made) if isinstance(one, Tensor)]
        factor = _MATMUL if "mm" in str(func) or "conv" in str(func) else 1
        self.advance(int(sum(sizes) * factor * _NS_PER_BYTE) + _LAUNCH_NS)
        return made

    def advance(self, ns: int) -> None:
        """The host and the GPU work so long."""
        self._sim.stagehand_sim_advance_ns(ns)

    def now_ns(self) -> int:
        """Once all that was queued is done."""
        self._sim.stagehand_sim_drain()
        return int(self._sim.stagehand_sim_clock_ns())
