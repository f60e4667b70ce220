"""Plain arguments (numbers, names, flags) before they reach the C library.

cffi would refuse a wrong type too, but with a line that names no argument. Here a wrong type is a TypeError and a wrong
value an InvalidArgument, both with the argument's name, what was found and what was expected. bool is no number: where
one is wanted, True is a slip.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from apa_attention._library import bad

INT64 = 2**63
_SHOWN = 60  # characters; what is longer is told by its type


def shown(value: object) -> str:
    """A value for a line of text: itself where that is short and plain, else its type."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, (bool, int, float, complex, str)) and len(written := repr(value)) <= _SHOWN:
        return f"{written} ({kind})"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def wrong_type(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name}: {shown(value)}, expected {expected}")


def _is_single(value: Any) -> bool:
    """No flag, and no array but of no axes."""
    kind = str(getattr(value, "dtype", ""))
    return not isinstance(value, (bool, str, bytes)) and not kind.endswith("bool") and getattr(value, "ndim", 0) == 0


def whole(value: Any, name: str, expected: str = "a whole number", low: int = -INT64, high: int = INT64 - 1) -> int:
    """int, numpy's and other libraries' whole numbers."""
    try:
        if not _is_single(value):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise wrong_type(name, value, expected) from None
    if not low <= found <= high:
        raise bad(name, found if abs(found) <= INT64 else "a number of more than 64 bits", expected)
    return found


def real(value: Any, name: str, expected: str = "a number") -> float:
    """float, int, numpy's numbers, tensors without axes. NaN and infinities pass: the library has its say about them."""
    try:
        if not _is_single(value):
            raise TypeError
        return float(value)
    except OverflowError:
        raise bad(name, "a number beyond double's range", expected) from None
    except (TypeError, ValueError, RuntimeError):
        raise wrong_type(name, value, expected) from None


def name_bytes(value: object, name: str, expected: str) -> bytes:
    """A name as C takes it; one with a NUL inside would be cut there."""
    if not isinstance(value, str):
        raise wrong_type(name, value, expected)
    if "\0" in value or not value.isprintable():
        raise bad(name, shown(value), expected)
    return value.encode()


def path_bytes(path: Any) -> bytes:
    try:
        written = os.fsencode(path)
    except TypeError:
        raise wrong_type("path", path, "a str or an os.PathLike") from None
    if b"\0" in written:
        raise bad("path", shown(path), "a path without NUL")
    return written


def known(options: Mapping[str, object], names: Sequence[str]) -> None:
    """Options that come as **options: a misspelt one must not be dropped."""
    for name in options:
        if name not in names:
            raise TypeError(f"{name}: no such argument, expected one of {', '.join(names)}")
