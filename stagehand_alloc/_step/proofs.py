"""The recipe library: saved tensors that their autograd node can make again need no copy.

Built on first use against the installed torch, for pools with ``recompute``. Where it cannot be
had, everything is moved as without it; nothing here raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from stagehand_alloc._built import build as _build
from stagehand_alloc._built import compiler as _recipe
from stagehand_alloc._built import side as _side
from stagehand_alloc._built import tensors as _tensors
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Once
from stagehand_alloc._tell import warn

LIBRARY = _recipe.Library(
    name="recipes",
    words="recipe library",
    source=Path("torch_hook") / "recipes.cpp",
    link=("torch_python", "torch_cpu", "c10"),
    seconds=25,
    python=True,
)

_MANY = 512  # proofs are not collected until then where no pool is entered

_loaded = Once[str]()  # what the first try came to


def load(allowed: bool = True) -> str:
    """Use the library in this process from here on; the first call that may decides.

    "loaded", or why not. May take as long as a compiler does.
    """
    tensors = _tensors.load(allowed)
    if not allowed or tensors != "loaded":
        return _loaded.found or tensors
    return _loaded.get(lambda: _side.load(LIBRARY, "stagehand_recipe_side", native.use_recipe_side))


def outlook() -> str:
    """What `load` would find, in words; nothing is built or loaded. Raises CompilerError."""
    return _build.outlook(LIBRARY, ": nothing is made again")


_What = tuple[int, int, int, bool, bool]  # the engine's words; [3]: it was proven before


class _Proof(NamedTuple):
    found: Any  # a tensor of one bool: they differ. Or the sum of the bytes that were saved,
    now: Any  # and that of what is there since; None beside a bool
    stream: int  # CUDA's handle of the stream that they are made on
    what: _What
    op: str


class Proofs:
    """Comparisons of what was made again with what was saved, read once the GPU is past them.

    One for a device, whichever pools are entered there. The hooks call `add` on any thread, with
    the GIL; `collect` is for a pool's entry, and for one pool around many steps. It waits for
    nothing.
    What differs is moved from then on, and told of once by the name of its op.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._new: list[_Proof] = []
        self._read: tuple[Any, Any, list[_Proof]] | None = None
        self._told: set[tuple[str, bool]] = set()

    def add(self, found: Any, now: Any, stream: int, what: _What, op: str) -> None:
        """One comparison was queued: the fields of a `_Proof`."""
        made = _Proof(found, now, stream, what, op)  # first: another thread may swap the list then
        self._new.append(made)
        if len(self._new) >= _MANY:
            self.collect()

    def collect(self) -> None:
        """Tell the engine of those that the GPU is past, and start reading the others."""
        import torch

        device = self._device
        if self._read is not None:
            event, host, asked = self._read
            if event is not None and not event.query():
                return
            self._read = None
            for differs, proof in zip(host.tolist(), asked, strict=True):
                native.proved(device, proof.what, not differs)
                if differs:
                    self._tell(proof.op, after=proof.what[3])
        if not self._new:
            return
        new, self._new = self._new, []
        # A copy: what another thread appends to `new` now is not told of, nor in another's place.
        asked = sorted(new, key=lambda proof: proof.now is not None)
        if not asked[0].found.is_cuda:
            self._read = (None, _differ(asked), asked)
            return
        cuda: Any = torch.cuda
        with cuda.device(device):
            here = cuda.current_stream()
            for stream in {proof.stream for proof in asked} - {here.cuda_stream}:
                # A handle of 0 would give a new stream.
                here.wait_stream(cuda.ExternalStream(stream) if stream else cuda.default_stream())
            for proof in asked:
                if proof.stream != here.cuda_stream:
                    for tensor in (proof.found, proof.now):
                        if tensor is not None:
                            tensor.record_stream(here)
            flags = _differ(asked)
            host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
            host.copy_(flags, non_blocking=True)
            event = cuda.Event()
            event.record()
        self._read = (event, host, asked)

    def _tell(self, op: str, after: bool) -> None:
        if (op, after) in self._told:
            return
        self._told.add((op, after))
        if after:
            warn(
                f"stagehand_alloc: an output of {op} no longer comes back bit by bit when it is "
                "made again, as it did before. Nothing is made so from here on until it is proven "
                "anew; gradients since it was last compared may be wrong.\n"
                "Look for what began to write to tensors behind autograd's back, such as a kernel "
                "or .data, go back to a checkpoint from before that, or pass recompute=False."
            )
        else:
            warn(
                f"stagehand_alloc: some output of {op} did not come back bit by bit when it was "
                "made again. Such tensors are moved to the host instead; results are right."
            )


def _differ(asked: list[_Proof]) -> Any:
    """A bool for each, of which those of sums come last."""
    import torch

    flags = [proof.found for proof in asked if proof.now is None]
    before = [proof.found for proof in asked if proof.now is not None]
    now = [proof.now for proof in asked if proof.now is not None]
    parts = [torch.stack(flags)] if flags else []
    if now:
        parts.append(torch.stack(before) != torch.stack(now))
    return torch.cat(parts)


def sharded() -> bool:
    """Whether weights may be away between their uses, as with FSDP and ZeRO."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def ranks() -> bool:
    """Whether other processes take part in a step."""
    from torch import distributed

    return sharded() and distributed.get_world_size() > 1
