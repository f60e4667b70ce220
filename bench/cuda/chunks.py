#!/usr/bin/env python3
"""Calls on device pointers beyond the plain one: a prompt in chunks with and without kept keys, and paged keys.

    python3 bench/cuda/chunks.py --library build/libapa.so [--keys 32768] [--chunk 2048] [--heads 24,8] [--dim 128]

Chunks: all calls of the prompt one after the other, timed as one by device events; with kept keys a call prepares those
that are new to it. Pages: the last chunk over all keys, flat and in shuffled pages of several sizes. Medians of --repeats
after a warm-up, prep counted. "to exact" is the relative L2 over all rows of the prompt to our exact method in the same chunks."""
import argparse
import statistics
import time

import torch

from bench import Library, compare, make, once


def chunks_of(library, method, settings, family, q, k, v, chunk, kept):
    """One function for all chunks, and the output that it fills."""
    outs, runs = [], []
    room, memory = k.shape[2], None
    for first in range(0, q.shape[2], chunk):
        end = min(first + chunk, q.shape[2])
        rows = q[:, :, first:end]
        out = torch.empty(*rows.shape, dtype=torch.float16, device="cuda")
        lse = torch.empty(*rows.shape[:3], dtype=torch.float32, device="cuda")
        arguments = (method, rows, k[:, :, :end], v[:, :, :end], out, lse, True, settings, family)
        if kept and memory is None:
            asked = library.call(*arguments, kept=(None, room, 0)).prepared_bytes
            memory = torch.empty(max(asked, 256), dtype=torch.uint8, device="cuda")
        runs.append(library.call(*arguments, kept=(memory, room, first) if kept else None))
        outs.append(out)
    return (lambda: [run() for run in runs]), outs


def median(run, repeats, pause):
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        times.append(once(run))
        time.sleep(pause)
    return statistics.median(times)


def paged(x, page, order):
    """[1, H, S, D] as [pages, H, page, D], page i of the sequence at order[i]."""
    pages = torch.empty(len(order), x.shape[1], page, x.shape[3], dtype=x.dtype, device="cuda")
    pages[order] = x[0].reshape(x.shape[1], -1, page, x.shape[3]).transpose(0, 1)
    return pages


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--keys", type=int, default=32768, help="a multiple of 256")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--heads", default="24,8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--kind", default="topics")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.1)
    arguments = parser.parse_args()
    library, (Hq, Hkv), S = Library(arguments.library), map(int, arguments.heads.split(",")), arguments.keys
    q, k, v = make(arguments.kind, (1, Hq, Hkv, S, S, arguments.dim, True), torch.float16)
    print(torch.cuda.get_device_name(), f"{S} keys in chunks of {arguments.chunk}, {Hq}/{Hkv}, D {arguments.dim}, {arguments.kind}", flush=True)
    fine = [("qk_scale_granularity", "row")]
    whole = None
    for name, method, settings, family, kept in (
        ("exact", "exact", (), "wgmma", False), ("apa", "apa", (), "wgmma", False), ("apa, kept", "apa", (), "wgmma", True),
        ("exact", "exact", (), "warp", False), ("apa, fine", "apa", fine, "warp", False), ("apa, fine, kept", "apa", fine, "warp", True),
    ):
        try:
            run, outs = chunks_of(library, method, settings, family, q, k, v, arguments.chunk, kept)
        except RuntimeError as e:
            print(f"{name} {family} left out:", e)
            continue
        ms = median(run, arguments.repeats, arguments.pause)
        got = torch.cat(outs, dim=2)
        whole = got if whole is None else whole
        error, cosine = compare(got, whole)
        print(f"chunks {name:16} {family:6} {ms:9.3f} ms  to exact {error:.1e}, smallest cosine {cosine:.5f}", flush=True)
    rows = q[:, :, -arguments.chunk :].contiguous()
    out, lse = torch.empty_like(rows), torch.empty(*rows.shape[:3], dtype=torch.float32, device="cuda")
    for method in ("exact", "apa"):
        run = library.call(method, rows, k, v, out, lse, True)
        ms = median(run, arguments.repeats, arguments.pause)
        flat = out.clone()
        print(f"flat {method:6} {ms:9.3f} ms, workspace {run.workspace_bytes / 2**20:.0f} MiB", flush=True)
        for page in (16, 64, 256):
            order = torch.randperm(S // page, device="cuda")
            out.fill_(float("nan"))
            run = library.call(method, rows, paged(k, page, order), paged(v, page, order), out, lse, True, pages=(order.to(torch.int32).unsqueeze(0), S))
            ms = median(run, arguments.repeats, arguments.pause)
            same = "the bits of flat" if torch.equal(out, flat) else "OTHER BITS"
            print(f"pages of {page:3} {method:6} {ms:9.3f} ms, {same}, workspace {run.workspace_bytes / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
