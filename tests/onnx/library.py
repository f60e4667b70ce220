"""The public C API of libapa as ctypes sees it: as much of include/apa/{tensor,context,attention,recipe}.h as the tests need.

Structs are written out again here; apa_problem_init() says how large C has apa_problem, which must agree."""

import ctypes

import ml_dtypes
import numpy

DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4, "bool": 5}
CAUSAL_NONE, CAUSAL_BOTTOM_RIGHT, CAUSAL_TOP_LEFT = 0, 1, 2
UNSUPPORTED = 20
assert ml_dtypes.bfloat16  # gives numpy its bfloat16


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


class Problem(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *[(name, Tensor) for name in ("q", "k", "v", "out", "lse")],
        ("softmax_scale", ctypes.c_double),
        ("causal", ctypes.c_int32),
        ("q_offset", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        *[(name, Tensor) for name in ("attn_mask", "mask_slopes", "alibi_slopes", "sinks")],
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("seqused_k", ctypes.c_void_p),
        ("q_offsets", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("engine", ctypes.c_char_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("verdicts", ctypes.c_void_p),
        ("more", ctypes.c_uint64 * 64),  # fields that the tests don't use, so that a longer struct fits
    ]


class Refused(Exception):
    """The engine can't run the call, and says why."""


def tensor(array):
    """A view of a 4-D numpy array: strides as they are."""
    if array.ndim != 4:
        raise ValueError(f"{array.ndim} dimensions, expected 4")
    strides = [stride // array.itemsize for stride in array.strides]
    return Tensor(array.ctypes.data, DTYPES[array.dtype.name], (ctypes.c_int64 * 4)(*array.shape), (ctypes.c_int64 * 4)(*strides))


class Library:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.apa_context_message.restype = ctypes.c_char_p
        self.c.apa_context_message.argtypes = [ctypes.c_void_p]
        self.c.apa_attention.argtypes = [ctypes.c_void_p] * 5
        self.context = ctypes.c_void_p()
        if self.c.apa_context_create(ctypes.byref(self.context), None) != 0:
            raise RuntimeError("apa_context_create")
        probe = ctypes.create_string_buffer(4096)
        self.c.apa_problem_init(probe)
        size = ctypes.cast(probe, ctypes.POINTER(ctypes.c_size_t))[0]
        if size != ctypes.sizeof(Problem):
            raise RuntimeError(f"apa_problem has {size} bytes, expected {ctypes.sizeof(Problem)}: library.py is behind the header")
        self.recipe = ctypes.create_string_buffer(4096)  # larger than apa_recipe, which stays opaque here

    def problem(self):
        problem = Problem()
        self.c.apa_problem_init(ctypes.byref(problem))
        return problem

    def attention(self, problem, method, engine):
        options = Options()
        self.c.apa_attention_options_init(ctypes.byref(options))
        options.engine = engine.encode()
        if self.c.apa_recipe_init(self.recipe, method.encode()) != 0:
            raise RuntimeError(f"recipe {method}")
        status = self.c.apa_attention(self.context, ctypes.byref(problem), self.recipe, ctypes.byref(options), None)
        if status == 0:
            return
        message = self.c.apa_context_message(self.context).decode()
        raise (Refused if status == UNSUPPORTED else RuntimeError)(message)


def empty(shape, dtype):
    return numpy.full(shape, 7, dtype=dtype)
