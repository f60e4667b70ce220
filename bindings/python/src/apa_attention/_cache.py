"""KVCache: keys and values of growing sequences, with their quantised tiles kept beside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apa_attention import _arrays, _attention, _problem, _recipe
from apa_attention._checks import path_bytes, real, whole, wrong_type
from apa_attention._library import InvalidArgument, Unsupported, bad, check, contexts, ffi, lib
from apa_attention._problem import Array, Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

ABSENT = -1  # what the library says of a sequence that there is not


@dataclass(frozen=True)
class KVCacheUsage:
    """What a cache holds."""

    sequences: int
    pages_used: int
    pages_free: int
    tiles: int  # quantised ones that are held; shared ones count once
    tile_bytes: int


class KVCache:
    """Keys and values of one layer's growing sequences, in pages, every whole tile of 64 keys quantised once.

    heads, dim, dim_v   KV heads, D, Dv (None: D)
    dtype               of keys and values: float16, bfloat16 or float32, as a name or a numpy or PyTorch dtype
    page_size, pages    keys of a page, and how many pages there are; memory is touched as it fills. One page per
                        sequence (page_size the longest context) is a flat cache
    method, eps, set    the recipe whose tiles are kept, as attention()'s; attend() uses it unless told otherwise
    growth              K's mean is renewed where the context has grown by this factor
    window_tiles        0 keeps all quantised tiles; else the first and the last so many, others are made again when seen

    Sequences are numbers: add() gives one. A tile depends on the keys up to it alone, so chunk sizes, forks and
    roll-backs change no bit. A call that raises has changed nothing. Calls from several threads wait for each other.
    InvalidArgument is raised for a sequence that there is not, OutOfMemory when pages run out. `with` or close() frees
    the memory at once."""

    def __init__(
        self,
        heads: int,
        dim: int,
        *,
        dim_v: int | None = None,
        dtype: Any = "float16",
        page_size: int = 64,
        pages: int = 1024,
        method: str = "apa",
        eps: float | None = None,
        set: Mapping[str, object] | None = None,
        growth: float = 1.125,
        window_tiles: int = 0,
    ) -> None:
        options = ffi.new("apa_kv_cache_options *")
        lib.apa_kv_cache_options_init(options)
        options.heads, options.dim = whole(heads, "heads"), whole(dim, "dim")
        options.dim_v = options.dim if dim_v is None else whole(dim_v, "dim_v")
        options.dtype = _arrays.type_code(_arrays.dtype_name(dtype, "dtype"))
        options.page_size, options.pages = whole(page_size, "page_size"), whole(pages, "pages")
        options.growth, options.window_tiles = real(growth, "growth"), whole(window_tiles, "window_tiles")
        recipe = _recipe.make(method, eps, set)
        options.recipe = recipe
        self._begin(lambda context, made: lib.apa_kv_cache_create(context, options, made))

    def _begin(self, make: Callable[[Any, Any], int]) -> None:
        made = ffi.new("apa_kv_cache **")
        with contexts.borrow() as context:
            check(make(context, made), context)
        self._cache: Any = ffi.gc(made[0], lib.apa_kv_cache_destroy)
        self._lock = threading.Lock()
        self._dim_v = self._value_dim()

    def _value_dim(self) -> int:
        """Dv, from the view of no sequences."""
        problem, none = ffi.new("apa_problem *"), ffi.new("int64_t[1]")
        self._call(lib.apa_kv_cache_view, none, 0, problem, none, ffi.new("int32_t[1]"), ffi.new("int64_t *", 1))
        return int(problem.v.shape[3])

    def _call(self, function: Any, *arguments: Any) -> None:
        """function(context, cache, …), one at a time."""
        with self._lock, contexts.borrow() as context:
            if self._cache is None:
                raise InvalidArgument("cache: it is closed", "APA_STATUS_INVALID_ARGUMENT")
            check(function(context, self._cache, *arguments), context)

    # ---- sequences

    def add(self) -> int:
        """A new, empty sequence."""
        sequence = ffi.new("int64_t *")
        self._call(lib.apa_kv_cache_add, sequence)
        return int(sequence[0])

    def fork(self, sequence: int) -> int:
        """A new sequence that begins as this one is now; pages and tiles are shared until one side writes."""
        made = ffi.new("int64_t *")
        self._call(lib.apa_kv_cache_fork, _number(sequence), made)
        return int(made[0])

    def rollback(self, sequence: int, keys: int) -> None:
        """Drops all keys from number `keys` on."""
        self._call(lib.apa_kv_cache_rollback, _number(sequence), whole(keys, "keys"))

    def remove(self, sequence: int) -> None:
        """Ends a sequence; its number is given out again."""
        self._call(lib.apa_kv_cache_remove, _number(sequence))

    def keys(self, sequence: int) -> int:
        """How many keys a sequence has."""
        number = _number(sequence)
        with self._lock:
            found = ABSENT if self._cache is None else int(lib.apa_kv_cache_keys(self._cache, number))
        if found == ABSENT:
            raise bad("sequence", sequence, "a number that add() or fork() gave")
        return found

    def usage(self) -> KVCacheUsage:
        """Pages and tiles in use."""
        found = ffi.new("apa_kv_cache_usage *")
        lib.apa_kv_cache_usage_init(found)
        self._call(lib.apa_kv_cache_usage_get, found)
        return KVCacheUsage(**{name: int(getattr(found, name)) for name in KVCacheUsage.__dataclass_fields__})

    # ---- keys in, attention out

    def append(self, sequences: int | Sequence[int], k: Array, v: Array, *, layout: Layout = "hnd") -> None:
        """Adds n keys to each of the sequences: k [count, heads, n, D] and v [count, heads, n, Dv] of the cache's dtype
        (layout "nhd": [count, n, heads, D]); without the first axis for a single one. All or none."""
        numbers = _numbers(sequences)
        _problem.check_layout(layout)
        views = [_arrays.view(array, name) for name, array in (("k", k), ("v", v))]
        tensors = [_arrays.tensor(found, _problem.axes(found, "k", layout)) for found in views]
        for name, found in zip("kv", views):
            if found.device != _arrays.CPU:
                raise bad(name, f"device {found.device}", "cpu")
        self._call(lib.apa_kv_cache_append, numbers, len(numbers), *tensors)

    def attend(
        self,
        sequences: int | Sequence[int],
        q: Array,
        *,
        method: str | None = None,
        eps: float | None = None,
        set: Mapping[str, object] | None = None,
        engine: str = "auto",
        out: Array | None = None,
        return_lse: bool = False,
        return_statistics: bool = False,
        **options: Unpack[_problem.QueryOptions],
    ) -> Any:
        """attention() over the keys of the sequences: q [count, Hq, Sq, D], or packed by cu_seqlens_q; a single
        sequence may leave the first axis out.

        method None is the cache's recipe (eps and set then start from "apa"). Masks, windows, sinks and what is returned
        as attention()'s; causal=True means that the queries are a sequence's last keys. Raises what attention()
        raises; Unsupported when the recipe asks for other tiles than those that are kept."""
        numbers = _numbers(sequences)
        call = _problem.describe({"q": q}, options, self._dim_v)
        if call.device != _arrays.CPU:
            raise Unsupported(f"q: device {call.device}, a cache lies in host memory", "APA_STATUS_UNSUPPORTED")
        own = method is None and eps is None and (set is None or set == {})
        recipe = ffi.NULL if own else _recipe.make("apa" if method is None else method, eps, set)
        dtype = _problem.out_dtype(call, out)
        if out is None:
            out = _arrays.empty(q, call.out_shape, dtype)
        lse = _problem.empty_lse(call, dtype) if return_lse else None
        call.set_outputs(out, lse)
        statistics = ffi.new("apa_statistics *")
        lib.apa_statistics_init(statistics)
        how, _name = _attention.options_of(engine)
        self._call(lib.apa_kv_cache_attend, numbers, len(numbers), call.problem, recipe, how, statistics)
        return _attention.returned(out, lse, statistics if return_statistics else None)

    # ---- files, end

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole cache; the file appears complete or not at all."""
        self._call(lib.apa_kv_cache_save, path_bytes(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCache:
        """Reads what save() wrote; sequences keep their numbers."""
        made, written = cls.__new__(cls), path_bytes(path)
        made._begin(lambda context, cache: lib.apa_kv_cache_load(context, written, cache))
        return made

    def close(self) -> None:
        """Frees the memory now."""
        with self._lock:
            if self._cache is not None:
                ffi.release(self._cache)
                self._cache = None

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _number(sequence: Any) -> int:
    return whole(sequence, "sequence", "a number that add() or fork() gave")


def _numbers(sequences: int | Sequence[int]) -> Any:
    """One, or any list of them."""
    if isinstance(sequences, str):
        raise wrong_type("sequences", sequences, "a number that add() or fork() gave, or a list of them")
    if not isinstance(sequences, Iterable) or getattr(sequences, "ndim", 1) == 0:
        return ffi.new("int64_t[]", [_number(sequences)])
    return ffi.new("int64_t[]", [_number(s) for s in sequences])
