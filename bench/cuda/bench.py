#!/usr/bin/env python3
"""The CUDA engine beside PyTorch's SDPA back ends: same tensors, same process, prep counted.

    python3 bench/cuda/bench.py --library build/libapa.so [--shapes long,causal] [--kinds topics,sink-tail,randn] [--profile]

Every figure is the median of --repeats calls, each timed by device events, after a warm-up, the methods taking turns and with
a pause between blocks (a device under its power cap slows down when it is driven without one). "all pairs" is against our
own exact method on the same inputs, over every pair; "l2" and "worst" are against double precision on a sample of rows, and
for orientation only (tests/cuda/verify.c measures all pairs against the reference engine)."""
import argparse
import ctypes
import json
import math
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {  # B, Hq, Hkv, Sq, Skv, D, causal
    "long": (1, 24, 8, 2048, 122880, 128, False),
    "medium": (1, 24, 8, 2048, 32768, 128, False),
    "causal": (1, 24, 8, 8192, 8192, 128, True),
    "causal32k": (1, 24, 8, 32768, 32768, 128, True),
    "d64": (1, 32, 32, 16384, 16384, 64, True),
    "d256": (1, 16, 16, 16384, 16384, 256, True),
}


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]


class Problem(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor), ("lse", Tensor),
                ("softmax_scale", ctypes.c_double), ("causal", ctypes.c_int32), ("q_offset", ctypes.c_int64),
                ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("softcap", ctypes.c_double),
                ("attn_mask", Tensor), ("mask_slopes", Tensor), ("alibi_slopes", Tensor), ("sinks", Tensor),
                ("cu_seqlens_q", ctypes.c_void_p), ("cu_seqlens_k", ctypes.c_void_p), ("batch", ctypes.c_int64),
                ("seqused_k", ctypes.c_void_p), ("q_offsets", ctypes.c_void_p), ("block_table", ctypes.c_void_p),
                ("block_table_stride", ctypes.c_int64)]


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
                ("workspace_bytes", ctypes.c_size_t), ("counts", ctypes.c_void_p), ("verdicts", ctypes.c_void_p),
                ("family", ctypes.c_char_p), ("prepared", ctypes.c_void_p), ("prepared_bytes", ctypes.c_size_t),
                ("prepared_room", ctypes.c_int64), ("prepared_keys", ctypes.c_int64), ("prepared_mean", ctypes.c_int32),
                ("copy_bytes", ctypes.c_size_t)]


class Plan(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("engine", ctypes.c_char * 16), ("kernel", ctypes.c_char * 64),
                ("workspace_bytes", ctypes.c_size_t), ("prepared_bytes", ctypes.c_size_t), ("recipe", ctypes.c_char * 8192)]


DTYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}


def tensor(x):
    x4 = x if x.dim() == 4 else x.unsqueeze(-1)
    return Tensor(x4.data_ptr(), DTYPES[x4.dtype], (ctypes.c_int64 * 4)(*x4.shape), (ctypes.c_int64 * 4)(*x4.stride()))


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.apa_context_message.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        assert self.lib.apa_context_create(ctypes.byref(self.context), None) == 0

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.apa_context_message(self.context).decode())

    def call(self, method, q, k, v, out, lse, causal, settings=(), family="auto", pages=None, kept=None):
        """A function that enqueues one call on the current stream, and the counters it fills.

        pages: (block table int32 on the device [1, n], keys in use); k and v are then pages. kept: (memory or None, keys
        that it has room for, keys that are there)."""
        recipe = ctypes.create_string_buffer(8192)
        self.check(self.lib.apa_recipe_init(recipe, method.encode()))
        copy_bytes = int(dict(settings).get("copy_bytes", 0))  # an option of the call, no knob
        for name, value in settings:
            if name == "copy_bytes":
                continue
            self.check(self.lib.apa_recipe_set(recipe, name.encode(), value.encode(), None, ctypes.c_size_t(0)))
        problem, options, plan = Problem(), Options(), Plan()
        self.lib.apa_problem_init(ctypes.byref(problem))
        self.lib.apa_cuda_options_init(ctypes.byref(options))
        problem.q, problem.k, problem.v, problem.out, problem.lse = map(tensor, (q, k, v, out, lse))
        problem.causal = int(causal)
        used = (ctypes.c_int64 * 1)(pages[1] if pages else 0)
        if pages:
            problem.block_table, problem.block_table_stride = pages[0].data_ptr(), pages[0].shape[1]
            problem.seqused_k = ctypes.addressof(used)
        self.lib.apa_cuda_plan_init(ctypes.byref(plan))
        assert options.size == ctypes.sizeof(Options) and problem.size == ctypes.sizeof(Problem), "another version of libapa"
        options.family = family.encode()
        options.copy_bytes = copy_bytes
        if kept:
            options.prepared_room, options.prepared_keys = kept[1:]
            if kept[0] is not None:
                options.prepared, options.prepared_bytes = kept[0].data_ptr(), kept[0].numel()
        self.check(self.lib.apa_cuda_attention_plan(self.context, ctypes.byref(problem), recipe, ctypes.byref(options), ctypes.byref(plan)))
        workspace = torch.empty(max(plan.workspace_bytes, 256), dtype=torch.uint8, device="cuda")
        counts = torch.zeros(4, dtype=torch.int64, device="cuda")
        options.stream = torch.cuda.current_stream().cuda_stream
        options.workspace, options.workspace_bytes, options.counts = workspace.data_ptr(), workspace.numel(), counts.data_ptr()

        def run():
            self.check(self.lib.apa_cuda_attention(self.context, ctypes.byref(problem), recipe, ctypes.byref(options), None))
            return out

        run.keep = (workspace, recipe, problem, options, used, pages, kept)
        run.prepared_bytes = plan.prepared_bytes
        run.counts = counts
        run.workspace_bytes = plan.workspace_bytes
        run.engine, run.kernel = plan.engine.decode(), plan.kernel.decode()
        return run


def make(kind, shape, dtype, seed=1):
    """The constructions of `apa gen` (docs/command.md), with PyTorch's random numbers."""
    B, Hq, Hkv, Sq, Skv, D, _ = shape
    g = torch.Generator(device="cuda").manual_seed(seed)
    normal = lambda *s: torch.randn(*s, generator=g, device="cuda", dtype=torch.float32)
    q, k, v = normal(B, Hq, Sq, D), normal(B, Hkv, Skv, D), normal(B, Hkv, Skv, D)
    G = Hq // Hkv
    if kind == "topics":
        e = normal(Hkv, 16, D)
        e /= e.norm(dim=-1, keepdim=True)
        means = normal(Hkv, 16, D)
        of_key = torch.randint(16, (Hkv, (Skv + 255) // 256), generator=g, device="cuda").repeat_interleave(256, 1)[:, :Skv]
        of_query = torch.randint(16, (Hq, (Sq + 63) // 64), generator=g, device="cuda").repeat_interleave(64, 1)[:, :Sq]
        for h in range(Hkv):
            k[:, h] += 0.5 * math.sqrt(D) * e[h, of_key[h]]
            v[:, h] = means[h, of_key[h]] + 0.5 * v[:, h]
        for h in range(Hq):
            q[:, h] = 12 * e[h // G, of_query[h]] + 0.5 * q[:, h]
    elif kind == "sink-tail":
        e = torch.sign(normal(Hkv, D))
        u = torch.sign(normal(Hkv, D))
        a = math.log(9 * (Skv - 1)) + 0.25**2 / 2
        for h in range(Hkv):
            k[:, h] -= (k[:, h] @ e[h] / D)[..., None] * e[h]
            v[:, h] = -11.7 * u[h] + 8 * k[:, h].roll(-1, -1)
            k[:, h, 0] = e[h]
            v[:, h, 0] = u[h]
        for h in range(Hq):
            q[:, h] -= (q[:, h] @ e[h // G] / D)[..., None] * e[h // G]
            q[:, h] = a * e[h // G] / math.sqrt(D) + 0.25 * q[:, h]
    return [x.to(dtype) for x in (q, k, v)]


def load(name):
    """`dump:FILE[:B]`: q, k and v of a QKV dump (data/make_dumps.py), the last queries of a prompt, B times over; and their shape."""
    path, _, batch = name[len("dump:"):].partition(":")
    with open(path, "rb") as file:
        n, keys, Hq, Hkv, D, offset = (int.from_bytes(file.read(4), "little") for _ in range(6))
        if n + offset != keys:
            raise SystemExit(f"{path}: queries end at {n + offset} of {keys} keys")
        rest = torch.frombuffer(bytearray(file.read()), dtype=torch.float16)
    B = int(batch or 1)
    parts = rest.split([n * Hq * D, keys * Hkv * D, keys * Hkv * D])
    tensors = [x.view(-1, H, D).transpose(0, 1)[None].expand(B, -1, -1, -1).contiguous().cuda() for x, H in zip(parts, (Hq, Hkv, Hkv))]
    return tensors, (B, Hq, Hkv, n, keys, D, True)


PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def sdpa(backend, q, k, v, causal):
    def run():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return run


def truth(q, k, v, causal, rows):
    G = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], len(rows), q.shape[3], dtype=torch.float64, device="cuda")
    for h in range(q.shape[1]):
        s = q[:, h, rows].double() @ k[:, h // G].double().transpose(-1, -2) / math.sqrt(q.shape[3])
        if causal:
            j = torch.arange(k.shape[2], device="cuda")
            s.masked_fill_(j[None, :] > (torch.tensor(rows, device="cuda") + k.shape[2] - q.shape[2])[:, None], -math.inf)
        out[:, h] = s.softmax(-1) @ v[:, h // G].double()
    return out


def compare(got, expected):
    """Relative L2 and smallest cosine over all pairs, head by head to bound the memory."""
    if expected is None:
        return math.nan, math.nan
    square = total = 0.0
    least = 1.0
    for h in range(got.shape[1]):
        x, y = got[:, h].double(), expected[:, h].double()
        square += (x - y).square().sum().item()
        total += y.square().sum().item()
        least = min(least, F.cosine_similarity(x, y, dim=-1).min().item())
    return math.sqrt(square / total), least


def clock():
    """SM clock right now: the card is under a power cap and slows down under long loads."""
    asked = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return asked.stdout.split("\n")[0].strip() if asked.returncode == 0 else "?"


def chosen(methods, families):
    """(name, preset with settings, family) of each; peers as they are."""
    for m in methods:
        text, _, family = m.partition("@")
        for f in [family] if family or m in PEERS else families:
            yield (m if len(families) == 1 or family or m in PEERS else f"{m}@{f}"), text, f or "auto"


def once(run):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--shapes", default="long,causal", help=", ".join(SHAPES) + "; or dump:FILE[:B], a QKV dump, B times over")
    parser.add_argument("--kinds", default="topics,sink-tail,randn")
    parser.add_argument("--methods", default="flash,cudnn,exact,apa,cold",
                        help="peers, and presets with settings and a kernel family: apa:cold_format=e4m3:eps=0.01, exact@warp, apa:eps=0.01@wgmma, apa:copy_bytes=100000000")
    parser.add_argument("--family", default="auto", help="kernel family of the methods that name none; several: each method by each (warp,wgmma)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.15)
    parser.add_argument("--json")
    parser.add_argument("--profile", action="store_true", help="time of every kernel of the last shape and kind")
    arguments = parser.parse_args()
    library, records = Library(arguments.library), []
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for name in arguments.shapes.split(","):
        real = load(name) if name.startswith("dump:") else None
        name = name.removeprefix("dump:")
        shape = real[1] if real else SHAPES[name]
        B, Hq, Hkv, Sq, Skv, D, causal = shape
        for kind in ["real"] if real else arguments.kinds.split(","):
            q, k, v = real[0] if real else make(kind, shape, torch.float16)
            out = torch.full((B, Hq, Sq, D), math.nan, dtype=torch.float16, device="cuda")
            lse = torch.empty(B, Hq, Sq, dtype=torch.float32, device="cuda")
            methods = {}
            for m, text, family in chosen(arguments.methods.split(","), arguments.family.split(",")):
                if m in PEERS:
                    if causal and Sq != Skv:
                        print(m, "left out: its causal line begins at the first key")
                    else:
                        methods[m] = sdpa(PEERS[m], q, k, v, causal)
                    continue
                preset, *settings = text.split(":")  # apa:cold_format=e4m3:eps=0.01
                try:
                    methods[m] = library.call(preset, q, k, v, out, lse, causal, [setting.split("=") for setting in settings], family)
                except RuntimeError as e:
                    print(m, "left out:", e)
            rows = sorted({0, 1, Sq // 3, Sq // 2, Sq - 1} | set(range(0, Sq, max(1, Sq // 24))))
            whole = None
            expected, times, errors = truth(q, k, v, causal, rows), {m: [] for m in methods}, {}
            all_pairs = {}
            for m, run in list(methods.items()):
                try:
                    got = run()
                    torch.cuda.synchronize()
                    if whole is None and m.split("@")[0] == "exact":
                        whole = got.clone()
                    all_pairs[m] = compare(got, whole)
                    d = (got[:, :, rows].double() - expected).norm(dim=-1)
                    errors[m] = ((d.norm() / expected.norm()).item(), (d / expected.norm(dim=-1)).max().item())
                except RuntimeError as e:
                    print(m, "left out:", str(e).splitlines()[0])
                    del methods[m]
            for _ in range(arguments.repeats):
                for m, run in methods.items():
                    times[m].append(once(run))
                time.sleep(arguments.pause)
            pairs = Sq * Skv - (Sq * (Sq - 1) // 2 if causal else 0)
            to = {peer: statistics.median(times[peer]) if peer in methods else math.nan for peer in PEERS}
            print(f"{name} {kind}: pause {arguments.pause} s, clock after the last block {clock()} MHz", flush=True)
            for m, run in methods.items():
                ms = statistics.median(times[m])
                spread = (max(times[m]) - min(times[m])) / ms
                counts = run.counts.tolist() if hasattr(run, "counts") else [0, 0, 0, 0]
                record = {"shape": name, "kind": kind, "method": m, "engine": getattr(run, "engine", ""), "kernel": getattr(run, "kernel", ""), "ms": ms, "spread": spread, "tflops": 4 * B * Hq * pairs * D / ms / 1e9,
                          "to_flash": ms / to["flash"], "to_cudnn": ms / to["cudnn"], "rel_l2": errors[m][0], "worst": errors[m][1],
                          "rel_l2_to_exact": all_pairs[m][0], "min_cos_to_exact": all_pairs[m][1],
                          "hot": counts[1] / max(counts[0], 1), "candidates": counts[2] / max(counts[0], 1),
                          "workspace_mib": getattr(run, "workspace_bytes", 0) / 2**20}
                records.append(record)
                print("{shape:9} {kind:9} {method:6} {engine:10} {ms:8.3f} ms ±{spread:4.0%} {tflops:6.0f} TFLOP/s {to_flash:5.2f} of flash {to_cudnn:5.2f} of cudnn  l2 {rel_l2:.1e} worst {worst:.1e} all pairs {rel_l2_to_exact:.1e} cos {min_cos_to_exact:.5f} "
                      "hot {hot:6.2%} ({candidates:.1%}) {workspace_mib:.0f} MiB".format(**record), flush=True)
            if arguments.profile:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    for m in methods:
                        if m.split("@")[0] in ("exact", "apa"):
                            methods[m]()
                    torch.cuda.synchronize()
                for event in profile.events():
                    if event.device_time < 1:
                        continue
                    print("   {:70} {:9.1f} us".format(event.name[:70], event.device_time))
            del q, k, v, out, lse, methods, expected
            torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w") as f:
            json.dump(records, f, indent=1)


if __name__ == "__main__":
    main()
