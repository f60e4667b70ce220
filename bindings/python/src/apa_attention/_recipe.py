"""Recipes: a method's numerics as a set of knobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apa_attention._checks import name_bytes, shown, wrong_type
from apa_attention._library import bad, ffi, lib, raise_status, text

MESSAGE_BYTES = 512


@dataclass(frozen=True)
class Knob:
    """One setting of a recipe: what `set={name: value}` takes."""

    name: str
    type: str  # "number", "integer", "choice"
    range: str  # "auto|off|on", "(-inf, inf)", "1 … 64"
    about: str
    source: str  # the method or document that it comes from


def _knobs() -> Iterator[Any]:
    i = 0
    while (knob := lib.apa_recipe_knob_at(i)) != ffi.NULL:
        yield knob
        i += 1


def knobs() -> tuple[Knob, ...]:
    """Every knob that `set` takes, with its range and a line about it."""
    return tuple(Knob(text(k.name), text(k.type), text(k.range), text(k.about), text(k.source)) for k in _knobs())


def recipes() -> dict[str, str]:
    """The names that `method` takes, with a line about each."""
    found: dict[str, str] = {}
    while (name := lib.apa_recipe_preset_name(len(found))) != ffi.NULL:
        found[text(name)] = text(lib.apa_recipe_preset_about(len(found)))
    return found


def knob_text(value: object) -> str:
    """A Python value as the text of a knob: True is "on", 0.02 is "0.02", None is "auto"."""
    if value is None:
        return "auto"
    if isinstance(value, (bool, np.bool_)):
        return "on" if value else "off"
    return repr(float(value)) if isinstance(value, float) else str(value)


def _set(recipe: Any, name: object, value: object) -> None:
    """One knob; a refusal shows the value as it was given."""
    key = name_bytes(name, "set", "names of knobs as its keys (see knobs())")
    written = knob_text(value)
    message = ffi.new("char[]", MESSAGE_BYTES)
    status = lib.apa_recipe_set(recipe, key, written.encode(errors="replace"), message, MESSAGE_BYTES)
    if status == 0 and "\0" in written:
        raise bad(str(name), shown(value), "no NUL in it")
    if status != 0:
        line = text(message)
        if not isinstance(value, str):  # "on" for True would be no word of the caller's
            line = line.replace(f'found "{written}"', f"found {shown(value)}")
        raise_status(status, line)


def make(method: str, eps: float | None, changes: Mapping[str, object] | None) -> Any:
    """apa_recipe *: a preset, then eps, then the knobs of `changes`."""
    recipe = ffi.new("apa_recipe *")
    name = name_bytes(method, "method", "a recipe's name (see recipes())")
    if lib.apa_recipe_init(recipe, name) != 0:
        raise bad("method", f'"{method}"', f"one of {', '.join(recipes())}")
    if changes is not None and not isinstance(changes, Mapping):
        raise wrong_type("set", changes, 'a mapping such as {"second_look": False}')
    if eps is not None:
        _set(recipe, "eps", eps)
    for knob, value in (changes or {}).items():
        _set(recipe, knob, value)
    return recipe


def to_dict(recipe: Any) -> dict[str, object]:
    """Every knob of an apa_recipe * by name: numbers as numbers; choices, "auto" and what is not finite as the text that
    `set` takes."""
    found: dict[str, object] = {"name": text(recipe.name)}
    buffer = ffi.new("char[]", 64)
    for knob in _knobs():
        if lib.apa_recipe_get(recipe, knob.name, buffer, 64) == 0:
            found[text(knob.name)] = _value(text(knob.type), text(buffer))
    return found


def _value(kind: str, written: str) -> object:
    if kind == "choice":
        return written
    try:
        number = float(written)
    except ValueError:
        return written
    if not math.isfinite(number):
        return written
    return int(number) if kind == "integer" else number


def recipe(
    method: str = "apa", *, eps: float | None = None, set: Mapping[str, object] | None = None
) -> dict[str, object]:
    """All knobs of a method, by name; "auto" where the engine that runs it decides (resolve() tells).

    Raises InvalidArgument for a method, knob or value that does not exist."""
    return to_dict(make(method, eps, set))
