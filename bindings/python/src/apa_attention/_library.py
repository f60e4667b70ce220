"""The C library: found, loaded, its contexts shared out among threads, its errors as exceptions.

A context (threads, scratch memory, the last error's line) serves one call at a time. Calls therefore borrow one from a
free list and give it back: as many exist as calls were ever under way at once, and a thread that comes and goes costs
none. cffi lets go of the GIL while a call runs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ffi: Any = importlib.import_module("apa_attention._declarations").ffi  # generated at build time


class ApaError(Exception):
    """What the C library said when it refused or failed: one line that names the argument, what was found and what was
    expected. `status` is the name of its status code, such as "APA_STATUS_UNSUPPORTED"."""

    def __init__(self, message: str, status: str = "APA_STATUS_INTERNAL") -> None:
        super().__init__(message)
        self.status = status


class InvalidArgument(ApaError, ValueError):
    """The caller's mistake: a value out of range, shapes that disagree, a knob that does not exist."""


class Unsupported(ApaError, NotImplementedError):
    """Sound, but no engine of this build (or not the one that was asked for) can do it. The line says what and why."""


class OutOfMemory(ApaError, MemoryError):
    """A request for memory failed."""


_EXCEPTIONS: dict[int, type[ApaError]] = {10: InvalidArgument, 20: Unsupported, 30: OutOfMemory}


def _open() -> Any:
    """The library beside this file, or the one that APA_LIBRARY names (for work on libapa itself)."""
    override = os.environ.get("APA_LIBRARY")
    path = Path(override) if override else next(iter(sorted(Path(__file__).parent.glob("libapa.so*"))), None)
    if path is None:
        raise ImportError(
            f"no libapa.so in {Path(__file__).parent}: the package was not built; expected `pip install` of it"
        )
    # Never unloaded: at the end of the interpreter its threads, and contexts that are freed late, may still run in it.
    loaded = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
    _check_layout(loaded, path)
    return loaded


def _check_layout(loaded: Any, path: Path) -> None:
    """Declarations and library come from one tree; where they do not, a wrong offset would read garbage."""
    for name in ("apa_problem", "apa_attention_options", "apa_statistics", "apa_plan", "apa_context_options"):
        found = ffi.new(f"{name} *")
        getattr(loaded, f"{name}_init")(found)
        if found.size != ffi.sizeof(found[0]):
            raise ImportError(
                f"{path}: its {name} has {found.size} bytes, this package expects {ffi.sizeof(name)}: "
                "library and package are of different versions"
            )


lib: Any = _open()


def text(pointer: Any) -> str:
    """A C string as str; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode()


def raise_status(status: int, message: str) -> None:
    """Raises the exception of a status that is not OK."""
    name = text(lib.apa_status_name(status))
    raise _EXCEPTIONS.get(status, ApaError)(message or name, name)


def check(status: int, context: Any) -> None:
    """Nothing if status is OK, else its exception with the context's line."""
    if status != 0:
        raise_status(status, text(lib.apa_context_message(context)))


def bad(name: str, found: object, expected: str) -> InvalidArgument:
    """The package's own refusals, in the words of the library's."""
    return InvalidArgument(f"{name}: {found}, expected {expected}", "APA_STATUS_INVALID_ARGUMENT")


class _Contexts:
    """Free contexts by number of threads."""

    def __init__(self) -> None:
        self.default_threads = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[Any]] = {}

    def _take(self, threads: int) -> Any:
        with self._lock:
            free = self._free.setdefault(threads, [])
            if free:
                return free.pop()
        options = ffi.new("apa_context_options *")
        lib.apa_context_options_init(options)
        options.threads = threads
        made = ffi.new("apa_context **")
        status = lib.apa_context_create(made, options)
        if status != 0:
            level = os.environ.get("APA_ISA")
            raise_status(status, f"no context for {threads} threads and APA_ISA={level}, expected a level of this CPU")
        return ffi.gc(made[0], lib.apa_context_destroy)

    @contextlib.contextmanager
    def borrow(self, threads: int | None = None) -> Iterator[Any]:
        wanted = self.default_threads if threads is None else threads
        context = self._take(wanted)
        try:
            yield context
        finally:
            with self._lock:
                self._free.setdefault(wanted, []).append(context)

    def after_fork(self) -> None:
        """A child has none of its parent's threads: what waits for them would wait for ever, and so would freeing it."""
        for free in self._free.values():
            for context in free:
                ffi.gc(context, None)
        self._free = {}
        self._lock = threading.Lock()


contexts = _Contexts()
os.register_at_fork(after_in_child=contexts.after_fork)


def set_threads(threads: int) -> None:
    """How many threads a call may use from now on; 0 (the start) is one per core that the process may use.

    No result depends on it. Contexts are kept per number, so switching back and forth costs nothing.
    Raises InvalidArgument unless 0 <= threads <= 4096."""
    from apa_attention._checks import whole  # which needs this module

    contexts.default_threads = whole(threads, "threads", "a whole number from 0 to 4096", 0, 4096)


def get_threads() -> int:
    """How many threads a call uses now."""
    with contexts.borrow() as context:
        return int(lib.apa_context_threads(context))
