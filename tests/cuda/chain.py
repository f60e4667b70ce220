#!/usr/bin/env python3
"""Kernels of a chain (src/cuda/chain.cuh) in PTX: what each does before it waits for the one before it.

    chain.py FILE.ptx ...

On every path through a kernel that says that the next one may start (griddepcontrol.launch_dependents):
  - no thread ends before griddepcontrol.wait: else a kernel could end before an earlier one has;
  - memory is not written, nor read by copies of their own, before it, and read at most where FIRST_READS says so.
Exit 1 with a line for each instruction that breaks that, or where no kernel is in a chain.
"""
import re
import sys

from in_flight import instructions, kernels

# Kernels that are launched plainly at the head of the chain, or touch nothing that others of it write, may do as they like
# but have to wait all the same (the head: has nothing to wait for). Others read inputs first.
FREE, HEAD, FIRST_READS = ("wgmma_exact_kernel",), ("wgmma_sum_kernel",), (
    "wgmma_pair_kernel",
    "wgmma_query_kernel",
)
WRITES = re.compile(r"\b(st\.global|st\.volatile|red\.|atom\.global|atom\.relaxed|st\.v\d|st\.(b|u|f)\d+)")
COPIES = re.compile(r"\bcp\.async")
READS = re.compile(r"\bld\.(global|v\d|[bufs]\d+)")


def broken(name, code, labels):
    """(index, what) of what comes before the wait."""
    found, seen, open_paths = set(), set(), [0]
    while open_paths:
        at = open_paths.pop()
        while at < len(code) and at not in seen:
            seen.add(at)
            instruction = code[at]
            if "griddepcontrol.wait" in instruction:
                break
            if re.search(r"(^|\s)(ret|exit)$", instruction) and not any(k in name for k in HEAD):
                found.add((at, "ends"))
            if not any(k in name for k in FREE + HEAD):
                if WRITES.search(instruction):
                    found.add((at, "writes"))
                if COPIES.search(instruction) and not any(k in name for k in FIRST_READS):
                    found.add((at, "copies"))
                if READS.search(instruction) and not any(k in name for k in FIRST_READS):
                    found.add((at, "reads"))
            branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", instruction)
            if branch:
                open_paths.append(labels[branch.group(1)])
                if not instruction.startswith("@"):
                    break
            at += 1
    return sorted(found)


def main(files):
    failed, chained = False, 0
    for path in files:
        with open(path) as file:
            text = file.read()
        for name, lines in kernels(text):
            code, labels = instructions(lines)
            if not any("griddepcontrol.launch_dependents" in instruction for instruction in code):
                continue
            chained += 1
            for at, what in broken(name, code, labels):
                failed = True
                print(f"{path}: {name}: {what} before the wait: {code[at]}")
    print(f"{chained} kernels in a chain")
    return failed or chained == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
