"""Attention on tensors in a CUDA device's memory, in PyTorch's current stream (apa/cuda.h)."""

from __future__ import annotations

import sys
from typing import Any

from apa_attention import _arrays
from apa_attention._library import Unsupported, bad, check, contexts, ffi, lib

ENGINES = ("auto", "cuda")


def run(call: Any, recipe: Any, engine: str, statistics: Any) -> None:
    """Puts the call on the stream and returns. Of the statistics, engine and recipe are filled in; counts and times
    would need the device to finish, so they stay 0."""
    if engine not in ENGINES:  # which of CUDA's engines runs is the library's choice here
        raise bad("engine", f'"{engine}"', '"auto" or "cuda", as q is in a CUDA device\'s memory')
    if not _arrays.is_torch(call.q):
        raise Unsupported(
            "q: a CUDA array of another library than PyTorch, whose allocator and stream are needed",
            "APA_STATUS_UNSUPPORTED",
        )
    torch = sys.modules["torch"]
    device = call.q.device
    with torch.cuda.device(device), contexts.borrow() as context:
        bytes_needed = ffi.new("size_t *")
        check(lib.apa_cuda_workspace_bytes(context, call.problem, recipe, bytes_needed), context)
        workspace = torch.empty(max(int(bytes_needed[0]), 1), dtype=torch.uint8, device=device)
        options = ffi.new("apa_cuda_options *")
        lib.apa_cuda_options_init(options)
        options.stream = ffi.cast("void *", torch.cuda.current_stream(device).cuda_stream)
        options.workspace = ffi.cast("void *", workspace.data_ptr())
        options.workspace_bytes = workspace.numel()
        resolved = ffi.new("apa_recipe *")
        check(lib.apa_cuda_attention(context, call.problem, recipe, options, resolved), context)
    # PyTorch's allocator gives the workspace's memory only to later work of the same stream.
    statistics.engine = b"cuda"
    statistics.recipe = resolved[0]


def devices() -> list[dict[str, object]]:
    """CUDA devices that this build can see, and what it does with each; empty without CUDA."""
    found: list[dict[str, object]] = []
    count = ffi.new("int32_t *")
    with contexts.borrow() as context:
        if lib.apa_cuda_device_count(context, count) != 0:
            return found
        for index in range(count[0]):
            device = ffi.new("apa_cuda_device *")
            lib.apa_cuda_device_init(device)
            check(lib.apa_cuda_device_describe(context, index, device), context)
            words = ("name", "kernels", "cold_format", "reason")
            found.append(
                {name: ffi.string(getattr(device, name)).decode() for name in words}
                | {"capability": device.capability, "memory_bytes": device.memory_bytes}
            )
    return found
