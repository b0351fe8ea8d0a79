"""The `stagehand` block around ours: what is done instead of what Weight Stagehand's keys say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.sizes import is_int, shown
from stagehand_alloc._tell import warn

NAME = "stagehand"

INSIDE = "the block inside says it, for weights and activations alike"
# Those that are no settings here (`load.ALIASES` has the others): what they hold, and what is done.
WITHOUT_EFFECT: dict[str, tuple[str, str]] = {
    "stagehand_enabled": ("bool", "`offload(model)` is what offloads weights"),
    "pinned_pool_mb": ("int", "`offload(model)` pins as many bytes as the weights have"),
    "pinned_slab_mb": ("int", "the weights of a block are one stretch of host memory"),
    "pinned_slab_alignment": ("int", "weights are aligned to 512 bytes"),
    "copy_stream_priority": ("int", "what is needed sooner is copied first"),
    "policy": ("str", "what is needed last leaves, as earlier steps showed"),
    "prefetch_window_blocks": ("int", "the next blocks come ahead where there is room"),
    "eviction_cooldown_steps": ("int", "a block leaves when something else needs its room"),
    "gpu_resident_weight_ratio": ("share", "as many blocks stay as `high` has room for"),
    "strict_bf16": ("bool", "weights keep their dtype"),
    "fail_on_dtype_promotion": ("bool", "weights keep their dtype"),
    "nan_inf_check": ("bool", "`torch.autograd.set_detect_anomaly(True)` looks for NaN"),
    "telemetry_interval_steps": ("int", "each step has a line"),
    "debug_trace": ("bool", "`stagehand_alloc.timeline()` shows what is done when"),
}
# Of those, what asks for no more than is done; of all others False does.
_ASKS_NOTHING = {"telemetry_interval_steps": 1, "stagehand_enabled": None}
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (is_int, "a whole number"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "share": (
        lambda value: (
            not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= 1
        ),
        "a number from 0 to 1",
    ),
}


def without_effect(block: Mapping[str, Any]) -> dict[str, str]:
    """Of keys that are no settings, what is done instead. Raises ConfigError for a wrong value."""
    found = {str(key): _instead_of(str(key), value) for key, value in block.items()}
    return {key: why for key, why in found.items() if why is not None}


def warn_of(without: Mapping[str, str]) -> None:
    """One warning of all keys that had no effect; none without any."""
    if without:
        settings = "1 setting" if len(without) == 1 else f"{len(without)} settings"
        lines = [f"  {key}: {why.replace('`', '')}" for key, why in without.items()]
        warn("\n".join([f'Of the "{NAME}" block {settings} had no effect. Instead:', *lines]))


def _instead_of(key: str, value: Any) -> str | None:
    """What is done instead; None where the value asks for nothing. Raises ConfigError."""
    if key not in WITHOUT_EFFECT:
        return "there is no such setting"
    kind, why = WITHOUT_EFFECT[key]
    fits, what = _KINDS[kind]
    if not fits(value):
        raise ConfigError(f"{key}={shown(value)} is not {what}.", f"Give {what}, or leave it out.")
    return None if value == _ASKS_NOTHING.get(key, False) else why
