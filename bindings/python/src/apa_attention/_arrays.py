"""Arrays of other libraries as apa_tensor: memory is described, not copied.

numpy arrays and PyTorch tensors are read directly, everything else through DLPack. A copy is made only of what the
library's descriptor can't say: a last axis whose elements are not side by side, foreign byte order, no alignment.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from apa_attention._checks import wrong_type
from apa_attention._library import Unsupported, bad, ffi

CPU, CUDA = "cpu", "cuda"
_DLPACK_DEVICES = {1: CPU, 2: CUDA, 3: CPU, 13: CUDA}  # host, CUDA, pinned host, managed
_DLPACK_TYPES = {(2, 16): "f16", (4, 16): "bf16", (2, 32): "f32", (2, 64): "f64", (6, 8): "bool"}
_NUMPY_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "bool": "bool"}
_TYPE_CODES = {"f16": 1, "bf16": 2, "f32": 3, "f64": 4, "bool": 5}
_TYPE_NAMES = "float16, bfloat16, float32 or float64"
_MASK_TYPE_NAMES = f"bool, {_TYPE_NAMES}"

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass
class View:
    """Where an array lies. `keep` holds its memory until the call is over."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    device: str
    keep: Any

    def plain(self, *, repeats: bool = False) -> bool:
        """Can an apa_tensor say this? Of an axis with one element, and of an empty array, the stride means nothing.
        repeats: a last axis that repeats one element (a mask's) can be said too."""
        if not self.shape or 0 in self.shape or self.shape[-1] == 1:
            return True
        return self.strides[-1] == 1 or (repeats and self.strides[-1] == 0)


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _view_numpy(array: np.ndarray[Any, Any], name: str, types: str) -> View:
    dtype = _NUMPY_TYPES.get(array.dtype.name)
    if dtype is None:
        raise bad(name, f"dtype {array.dtype}", types)
    size = array.itemsize
    if not array.dtype.isnative or any(s % size for s in array.strides) or array.ctypes.data % size:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    address = array.__array_interface__["data"][0]
    strides = tuple(s // size for s in array.strides)
    return View(address, dtype, array.shape, strides, CPU, array)


def _refuse_unusual(tensor: Any, name: str) -> None:
    """PyTorch's tensors that are no plain array of numbers, and those that want a gradient."""
    torch = sys.modules["torch"]
    if tensor.is_nested:
        raise bad(name, "a nested tensor", "a strided one")
    if tensor.layout != torch.strided:
        raise bad(name, f"layout {tensor.layout}", "torch.strided")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name}: requires a gradient, which libapa does not compute; use torch.no_grad() or {name}.detach()",
            "APA_STATUS_UNSUPPORTED",
        )


def _refuse_masked(array: Any, name: str) -> None:
    """numpy.ma's masks say what not to read, and no descriptor can."""
    if isinstance(array, np.ma.MaskedArray):
        raise bad(
            name,
            "a masked array, whose mask would be ignored",
            "a plain one (its .data or .filled(value)); attn_mask says which keys are seen",
        )


def _view_torch(tensor: Any, name: str, types: str) -> View:
    torch = sys.modules["torch"]
    known = {
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float32: "f32",
        torch.float64: "f64",
        torch.bool: "bool",
    }
    if tensor.dtype not in known:
        raise bad(name, f"dtype {tensor.dtype}", types)
    _refuse_unusual(tensor, name)
    if tensor.device.type not in (CPU, CUDA):
        raise bad(name, f"device {tensor.device}", "cpu or cuda")
    tensor = tensor.resolve_neg()
    try:
        address, strides = tensor.data_ptr(), tuple(tensor.stride())
    except RuntimeError:  # what torch.vmap and torch.func hand around
        address, strides = 0, ()
    if address == 0 and (not strides or tensor.numel()):
        raise bad(name, "a tensor without memory of its own", "one with data (not under torch.vmap or a fake mode)")
    return View(address, known[tensor.dtype], tuple(tensor.shape), strides, tensor.device.type, tensor)


def _view_dlpack(array: Any, name: str, types: str) -> View:
    device = _DLPACK_DEVICES.get(int(array.__dlpack_device__()[0]))
    if device is None:
        raise bad(name, f"DLPack device type {int(array.__dlpack_device__()[0])}", "a CPU or a CUDA device")
    capsule = array.__dlpack__()
    t = ffi.cast("DLManagedTensor *", _capsule_pointer(capsule, b"dltensor")).dl_tensor
    dtype = _DLPACK_TYPES.get((t.dtype.code, t.dtype.bits))
    if dtype is None or t.dtype.lanes != 1:
        raise bad(name, f"DLPack type code {t.dtype.code}, {t.dtype.bits} bits", types)
    shape = tuple(t.shape[i] for i in range(t.ndim))
    if t.strides != ffi.NULL:
        strides = tuple(t.strides[i] for i in range(t.ndim))
    else:
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(t.ndim))
    # The capsule is not consumed, so its own destructor frees what the producer lent.
    return View(int(ffi.cast("uintptr_t", t.data)) + t.byte_offset, dtype, shape, strides, device, (capsule, array))


def view(array: Any, name: str, *, output: bool = False, mask: bool = False) -> View:
    """Describes an array. mask: bool is a dtype too, and a last axis may repeat. Raises TypeError (no array),
    InvalidArgument (dtype, device, an output that can't be described), Unsupported (a gradient is wanted)."""
    types = _MASK_TYPE_NAMES if mask else _TYPE_NAMES
    _refuse_masked(array, name)
    if isinstance(array, np.ndarray):
        found = _view_numpy(array, name, types)
    elif is_torch(array):
        found = _view_torch(array, name, types)
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        found = _view_dlpack(array, name, types)
    else:
        raise wrong_type(name, array, "a numpy array, a PyTorch tensor or an array with DLPack")
    if found.dtype == "bool" and not mask:
        raise bad(name, f"dtype {array.dtype if is_torch(array) else found.dtype}", types)
    if output:
        _check_output(array, found, name)
    elif not found.plain(repeats=mask):
        if isinstance(array, np.ndarray):
            return _view_numpy(np.ascontiguousarray(array), name, types)
        if is_torch(array):
            return _view_torch(array.contiguous(), name, types)
        raise bad(name, f"strides {found.strides}", "elements of the last axis side by side")
    return found


def _check_output(array: Any, found: View, name: str) -> None:
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise bad(name, "an array that is read-only", "one that can be written to")
        if found.keep is not array:
            raise bad(name, "foreign byte order or elements that are not aligned", "this machine's")
    if is_torch(array) and array.is_neg():
        raise bad(name, "a view with its negative bit set", "memory as it is (resolve_neg() makes a copy)")
    if not found.plain():
        raise bad(name, f"strides {found.strides}", "elements of the last axis side by side")


def tensor(found: View, axes: tuple[int | None, ...]) -> Any:
    """An apa_tensor whose axis i is axis axes[i] of the array; None: an axis of length 1."""
    made = ffi.new("apa_tensor *")
    made.data = ffi.cast("void *", found.address)
    made.dtype = _TYPE_CODES[found.dtype]
    for i, axis in enumerate(axes):
        made.shape[i] = 1 if axis is None else found.shape[axis]
        made.stride[i] = 1 if axis is None else found.strides[axis]
    made.stride[3] = 1  # what is not plain() has been copied; numpy and others say 0 for arrays without elements
    return made


def type_code(dtype: str) -> int:
    """apa_dtype of a name."""
    return _TYPE_CODES[dtype]


def numpy_dtype(name: str) -> Any:
    if name == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"f16": "float16", "f32": "float32", "f64": "float64", "bool": "bool"}[name])


def dtype_name(dtype: Any, name: str) -> str:
    """ "f16" of "float16", numpy.float16, torch.float16 and so on."""
    try:
        if dtype is None:  # numpy would read it as float64
            raise TypeError
        written = dtype if isinstance(dtype, str) else str(dtype) if is_torch_dtype(dtype) else np.dtype(dtype).name
    except TypeError:
        raise wrong_type(name, dtype, f"a dtype: {_TYPE_NAMES}") from None
    found = _NUMPY_TYPES.get(written.removeprefix("torch."))
    if found is None or found == "bool":
        raise bad(name, f"dtype {written}", _TYPE_NAMES)
    return found


def is_torch_dtype(dtype: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of the library that `like` is of: PyTorch (on its device), else numpy."""
    if is_torch(like):
        torch = sys.modules["torch"]
        types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
        return torch.empty(shape, dtype=types[dtype], device=like.device)
    return np.empty(shape, numpy_dtype(dtype))


def _listed(array: Any, name: str, expected: str) -> np.ndarray[Any, Any]:
    """A few numbers as a numpy array, wherever they come from."""
    _refuse_masked(array, name)
    if is_torch(array):
        torch = sys.modules["torch"]
        _refuse_unusual(array, name)
        if array.device.type == "meta":
            raise bad(name, "device meta", "a tensor with data")
        array = array.detach().cpu()
        array = array.float() if array.dtype == torch.bfloat16 else array  # numpy has none
    try:
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError):  # lists of different lengths, tensors that numpy has no dtype for
        raise bad(name, f"a {type(array).__name__} that numpy can't read", expected) from None


def whole_numbers(array: Any, name: str, dtype: str) -> np.ndarray[Any, Any]:
    """Lengths, offsets and page numbers: small, so they are copied into what the library takes."""
    given = _listed(array, name, "whole numbers")
    if given.ndim == 0:
        raise bad(name, "no axis", "a list or an array of whole numbers")
    if given.dtype.kind not in "iu" and given.size:
        raise bad(name, f"dtype {given.dtype}", f"whole numbers that fit into {dtype}")
    made = np.ascontiguousarray(given, dtype=dtype)
    if not np.array_equal(made, given):
        raise bad(name, "a number that does not fit", f"{dtype}")
    return made


def per_head(array: Any, name: str) -> np.ndarray[Any, Any]:
    """Slopes and sinks: a float32 copy."""
    given = _listed(array, name, "a number for each head")
    if given.dtype.kind not in "fiu" and given.dtype.name != "bfloat16":
        raise bad(name, f"dtype {given.dtype}", "a number for each head")
    return np.ascontiguousarray(given, dtype=np.float32)
