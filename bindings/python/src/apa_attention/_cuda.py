"""Attention on tensors in a CUDA device's memory, in PyTorch's current stream (apa/cuda.h)."""

from __future__ import annotations

import sys
from typing import Any

from apa_attention import _arrays
from apa_attention._library import Unsupported, bad, check, contexts, ffi, lib

ENGINES = {"auto": "auto", "cuda": "auto", "cuda:warp": "warp", "cuda:wgmma": "wgmma"}  # and the kernel family of each


def run(call: Any, recipe: Any, engine: str, statistics: Any) -> None:
    """Puts the call on the stream and returns. Of the statistics, engine and recipe are filled in; counts and times
    would need the device to finish, so they stay 0."""
    if engine not in ENGINES:
        raise bad("engine", f'"{engine}"', f"one of {', '.join(ENGINES)}, as q is in a CUDA device's memory")
    if not _arrays.is_torch(call.q):
        raise Unsupported(
            "q: a CUDA array of another library than PyTorch, whose allocator and stream are needed",
            "APA_STATUS_UNSUPPORTED",
        )
    torch = sys.modules["torch"]
    device = call.q.device
    with torch.cuda.device(device), contexts.borrow() as context:
        family = ffi.new("char[]", ENGINES[engine].encode())
        options, plan = ffi.new("apa_cuda_options *"), ffi.new("apa_cuda_plan *")
        lib.apa_cuda_options_init(options)
        lib.apa_cuda_plan_init(plan)
        options.family = family
        check(lib.apa_cuda_attention_plan(context, call.problem, recipe, options, plan), context)
        workspace = torch.empty(max(int(plan.workspace_bytes), 1), dtype=torch.uint8, device=device)
        options.stream = ffi.cast("void *", torch.cuda.current_stream(device).cuda_stream)
        options.workspace = ffi.cast("void *", workspace.data_ptr())
        options.workspace_bytes = workspace.numel()
        check(lib.apa_cuda_attention(context, call.problem, recipe, options, ffi.NULL), context)
    # PyTorch's allocator gives the workspace's memory only to later work of the same stream.
    statistics.engine, statistics.kernel = ffi.string(plan.engine), ffi.string(plan.kernel)
    statistics.recipe = plan.recipe


def block_table(pages: Any, device: Any) -> Any:
    """int32 in the device's memory, where the call reads it: a table that is there already is taken as it is."""
    torch = sys.modules["torch"]
    if not (_arrays.is_torch(pages) and pages.device.type == _arrays.CUDA):
        return torch.from_numpy(_arrays.whole_numbers(pages, "block_table", "int32")).to(device)
    if pages.dtype != torch.int32 or pages.device != device:
        raise bad("block_table", f"{pages.dtype} on {pages.device}", f"torch.int32 on {device}, as q")
    return pages.contiguous()


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
