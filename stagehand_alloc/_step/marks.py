"""Modules as regions: ``pool(recompute=model.layers)`` runs their forward as a checkpointed one.
``recompute=True`` finds them: the blocks of what was called in the first step.

While a pool is entered, each module's ``forward`` is an attribute of its own that calls the one it
had inside `_regions.checkpoint`. On leaving it is as before: models are copied, saved and compiled
between two steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.config import NODES
from stagehand_alloc._settings.sizes import shown
from stagehand_alloc._step import regions as _regions
from stagehand_alloc._tell import warn_once

if TYPE_CHECKING:
    from torch import nn

_FORWARD = "forward"
_LOOKS = 3  # steps in a row, in which nothing new was called
_CACHES = ("past_key_values", "past_key_value", "layer_past")  # as Hugging Face calls them


class Region:
    """What stands in for a module's ``forward`` inside a pool."""

    def __init__(self, module: nn.Module, own: bool) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.own = own  # it was an attribute of the module before, too
        functools.update_wrapper(self, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _regions.worth_marking() or _fills_cache(kwargs):
            return self.forward(*args, **kwargs)
        function = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        return _regions.checkpoint(function, *args, context_fn=_regions.of_module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model, made inside the pool, has forwards of its own."""
        copied = memo.get(id(self.module))
        if copied is None or self.own:
            return self.forward
        return functools.partial(type(copied).forward, copied)


class Marks:
    """The regions of one pool, which keeps no model alive.

    Entering and leaving may be repeated, and interrupted anywhere.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # roots
        self._looks = 0

    @classmethod
    def found(cls) -> Marks:
        """Of no modules yet: those of what the first steps call, one model or several."""
        marks = cls([])
        marks._looks = _LOOKS
        return marks

    def looking(self) -> bool:
        """Whether the modules that are called are to be told to `look_in`."""
        return self._looks > 0

    def look_in(self, roots: list[nn.Module]) -> None:
        """They were called in a step: their blocks are regions from the next entry on."""
        if not roots or not self.looking():
            return
        new = [root for root in roots if root not in self._seen]
        self._seen.update(new)
        self._looks = _LOOKS if new else self._looks - 1
        found = [block for root in new if not _compiled(root) for block in _blocks(root)]
        known = dict.fromkeys([*self._alive(), *found])
        self._modules = [weakref.ref(block) for block in known]

    def _alive(self) -> list[nn.Module]:
        return [module for one in self._modules if (module := one()) is not None]

    def enter(self) -> None:
        for module in self._alive():
            if not isinstance(module.__dict__.get(_FORWARD), Region):
                module.__dict__[_FORWARD] = Region(module, _FORWARD in module.__dict__)

    def leave(self) -> None:
        for module in self._alive():
            region = module.__dict__.get(_FORWARD)
            if not isinstance(region, Region):
                continue
            if region.own:
                module.__dict__[_FORWARD] = region.forward
            else:
                del module.__dict__[_FORWARD]


def _fills_cache(kwargs: dict[str, Any]) -> bool:
    """Whether the call adds to a cache of keys and values: a second run would add to it again."""
    if all(kwargs.get(name) is None for name in _CACHES):
        return False
    warn_once(
        "stagehand_alloc: a module named by recompute= was called with a cache of keys and "
        "values, and does not run again: it would add to the cache twice.\n"
        "Set model.config.use_cache = False for training."
    )
    return True


def _compiled(module: nn.Module) -> bool:
    """Whether all of it is one compiled program, of which no block can be taken out."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def modules_of(asked: object) -> list[nn.Module]:
    """The modules that ``recompute=`` names: each to be one region.

    Of a list its entries; of a model its blocks, the entries of its outermost lists of two or more
    modules of one class; a module without such lists is one region. Raises ConfigError.
    """
    from torch import nn

    if isinstance(asked, nn.Module):
        return _blocks(asked) or [asked]
    if isinstance(asked, Iterable) and not isinstance(asked, str | bytes):
        found = list(asked)
        if found and all(isinstance(one, nn.Module) for one in found):
            return list(dict.fromkeys(found))
    raise ConfigError(
        f"recompute={shown(asked)} is neither a bool, nor {NODES!r}, nor modules.",
        f"Pass True, False, {NODES!r}, a list of modules such as model.layers, or the model.",
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    from torch import nn

    if isinstance(module, nn.ModuleList | nn.Sequential):
        children = list(module.children())
        kinds = {type(child) for child in children}
        if len(children) > 1 and (len(kinds) == 1 or isinstance(module, nn.ModuleList)):
            return children
    return [block for child in module.children() for block in _blocks(child)]
