"""Settings from a mapping or a file: where they stand, other names, and what was likely meant."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings import outer
from stagehand_alloc._settings.config import Config
from stagehand_alloc._settings.sizes import MIB, is_int, parse_inflight, shown
from stagehand_alloc._tell import warn

BLOCK_NAME = "activation_stagehand"
KEYS = tuple(one.name for one in dataclasses.fields(Config))


def _from_mebibytes(name: str, value: Any) -> Any:
    if value is None:
        return None
    if not is_int(value):
        raise ConfigError(f"{name}={value!r} is not an int.", f"Give {name} a whole number.")
    if value < 1:
        raise ConfigError(f"{name}={value} is below 1.", f"Raise {name} to 1.")
    return value * MIB


def _flag(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a bool.", f"Set {name} to true or false.")
    return value


def _inflight(name: str, value: Any) -> Any:
    return parse_inflight(value, name)


# Keys of Activation Stagehand v0, and of Weight Stagehand, that have another name now, and how they
# are read.
ALIASES: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "vram_high_watermark_mb": ("high", _from_mebibytes),
    "vram_low_watermark_mb": ("low", _from_mebibytes),
    "telemetry_enabled": ("telemetry", _flag),
    "max_inflight_transfers": ("max_inflight_h2d", _inflight),
}
WITHOUT_EFFECT = ("recompute_threshold_bytes",)  # likewise: read, and of no use here
_ARGUMENTS = ("keep", "on_step")  # of pool(), which no file can hold
_BUDGET = ("high", "low", "limit")  # are said by one block alone: they go together


def load_config(source: str | Path | Mapping[str, Any]) -> Config:
    """Read settings from a mapping, or from a JSON or TOML file.

    The keys are those of `Config`; those of Activation Stagehand v0 are read too. They may stand at
    the top, or in an ``activation_stagehand`` block at any depth, as in a v0 file. What that does
    not say is taken from the ``stagehand`` block around it, or from one alone; a StagehandWarning
    names the keys there that have no effect. Everything outside of the two is left alone.
    Raises ConfigError for a file that cannot be read and for an unknown key, naming the nearest.
    """
    if not isinstance(source, Mapping | str | Path):
        raise ConfigError(
            f"{shown(source)} is a {type(source).__name__}, not settings.",
            "Give a mapping of settings, or the path of a JSON or TOML file.",
        )
    data = source if isinstance(source, Mapping) else _read_file(Path(source))
    settings, around = _block(data, BLOCK_NAME), _block(data, outer.NAME)
    if around is None:
        return Config(**_canonical(_once(data if settings is None else settings)))
    beside = [key for key in data if _name_of(key) in _BUDGET]
    if settings is None and outer.NAME in data and beside:
        names = ", ".join(map(str, beside))
        raise ConfigError(
            f'{names} beside a "{outer.NAME}" block: which one is the budget?',
            f'Move them into the "{outer.NAME}" block, or leave that out.',
        )
    return Config(**_with_outer(_canonical(_once(settings or {})), _once(around)))


def _with_outer(inside: dict[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
    """`inside`, and of the block around it what that does not say; warns once of all else there."""
    names = {key: _name_of(key) for key in around if _name_of(key) in KEYS}
    said = _canonical({key: around[key] for key in names})
    Config(**said)  # checks them, also those that are said inside
    budget = not inside.keys().isdisjoint(_BUDGET)
    taken = {
        name: value
        for name, value in said.items()
        if name not in inside and not (budget and name in _BUDGET)
    }
    found = taken | inside
    other = [key for key, name in names.items() if found.get(name) != said[name]]
    rest = {
        key: value
        for key, value in around.items()
        if key not in names
        and key != BLOCK_NAME
        and not (isinstance(value, Mapping) and BLOCK_NAME in value)
    }
    outer.warn_of({**dict.fromkeys(other, outer.INSIDE), **outer.without_effect(rest)})
    return found


def _name_of(key: Any) -> Any:
    return ALIASES[key][0] if key in ALIASES else key


def _once(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, in which no key is twice. Raises ConfigError."""
    if twice := getattr(settings, "twice", None):
        raise ConfigError(f"{twice[0]!r} is set twice.", "Leave one of them.")
    return settings


def _block(data: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The block of that name, at whatever depth; None where there is none. Raises ConfigError."""
    try:
        blocks = list(_blocks(data, name))
    except RecursionError as error:
        raise ConfigError("The settings are nested too deeply to be read.", _HOW_TO_NEST) from error
    if len(blocks) > 1:
        raise ConfigError(
            f'There are {len(blocks)} blocks "{name}" in the settings.', "Leave one of them."
        )
    if blocks and not isinstance(blocks[0], Mapping):
        raise ConfigError(
            f"{name} is a {type(blocks[0]).__name__}, not a block of settings.",
            f'Write "{name}": {{...}} with the settings inside.',
        )
    return blocks[0] if blocks else None


def _canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that `Config` has. Raises ConfigError."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key in WITHOUT_EFFECT:
            _warn_of(key, value)
            continue
        name, read = ALIASES.get(key, (key, None))
        if name not in KEYS:
            raise ConfigError(f"Unknown setting {shown(key)}.", _instead_of(str(key)))
        if name in found:
            other = next(k for k in settings if k != key and _name_of(k) == name)
            raise ConfigError(
                f"{other!r} and {key!r} are one setting, and both are given.", f"Leave {name!r}."
            )
        found[name] = value if read is None else read(key, value)
    return found


def _warn_of(name: str, value: Any) -> None:
    if not is_int(value) or value < 0:
        raise ConfigError(f"{name}={value!r} is no number of bytes.", f"Leave {name} out.")
    if value:
        warn(f"The setting {name} has no effect in this version.\nLeave it out.")


def _instead_of(key: str) -> str:
    """What was likely meant by a setting there is none of."""
    near = difflib.get_close_matches(key.lower(), [*KEYS, *ALIASES, *_ARGUMENTS], n=1, cutoff=0.6)
    if not near:
        return f"The settings are: {', '.join(KEYS)}."
    if near[0] in _ARGUMENTS:
        return f"`{near[0]}` is no setting but an argument of pool(): give it there."
    return f"Did you mean {near[0]!r}?"


class _JsonObject(dict[str, Any]):
    """What a JSON object holds, and which keys it has more than once: Python takes the last."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.pairs = pairs
        self.twice = [name for at, name in enumerate(names) if name in names[:at]]


def _blocks(data: Any, name: str) -> Iterator[Any]:
    """Every block of that name in the settings, at whatever depth."""
    if isinstance(data, Mapping):
        for key, value in getattr(data, "pairs", None) or data.items():
            if key == name:
                yield value
            else:
                yield from _blocks(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from _blocks(value, name)


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            data = _load_toml(path, text)
        else:
            data = json.loads(text, object_pairs_hook=_JsonObject)
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be read.", _HOW_TO_NEST) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Settings cannot be read from {str(path)!r}: {error}.",
            "Give a readable JSON or TOML file.",
        ) from error
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path} holds a {type(data).__name__}, not an object.",
            f'Put the settings in an object, or in its "{BLOCK_NAME}" block.',
        )
    return data


_HOW_TO_NEST = f'Put the settings at the top, or in one "{BLOCK_NAME}" block.'


def _load_toml(path: Path, text: str) -> Mapping[str, Any]:
    if sys.version_info < (3, 11):
        raise ConfigError(f"{path}: TOML needs Python 3.11 or newer.", "Write the file as JSON.")
    import tomllib

    return tomllib.loads(text)
