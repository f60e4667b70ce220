#!/usr/bin/env python3
"""Asynchronous products (wgmma) in PTX: nothing may touch their registers while they are under way.

    in_flight.py FILE.ptx ...

A product is under way from its issue to the wait_group that covers its commit_group (PTX ISA, wgmma.mma_async). Until then
a read or a write of its sums, or a write of an A operand in registers, is a race that no compiler reports. Every path from
every product to that wait is followed. Exit 1 with a line for each such instruction, or where a file holds no product.
"""
import re
import sys

REGISTER = re.compile(r"%[a-z]+\d+")
LABEL = re.compile(r"(\$L\w+):")
STORES = ("st.", "bar", "red.", "ret", "cp.", "fence", "setmaxnreg", "mbarrier", "call")  # they write no register
MOST_GROUPS = 7  # wait_group takes small numbers: more groups behind a product need not be told apart


def kernels(text):
    """(name, lines) of every entry and function."""
    name, lines = None, []
    for line in text.split("\n"):
        start = re.match(r"(?:\.visible |\.weak )*\.(?:entry|func)\b.*?(_Z\w+)\(", line)
        if start:
            if name:
                yield name, lines
            name, lines = start.group(1), []
        lines.append(line)
    if name:
        yield name, lines


def instructions(lines):
    """Instructions in order, and the index that each label stands before."""
    code, labels = [], {}
    for line in lines:
        line = line.split("//")[0].strip()
        label = LABEL.match(line)
        if label:
            labels[label.group(1)] = len(code)
        elif not line.startswith("."):
            code += [part for part in (p.strip() for p in line.strip("{} \t").split(";")) if part]
    return code, labels


def lists(instruction):
    """Registers in each pair of braces."""
    return [set(REGISTER.findall(inside)) for inside in re.findall(r"\{([^}]*)\}", instruction)]


def written_and_read(instruction):
    body = re.sub(r"^@!?%?\w+\s+", "", instruction)
    operation, _, operands = body.partition(" ") if " " in body else body.partition("\t")
    if operation.startswith(STORES):
        return set(), set(REGISTER.findall(operands))
    first = re.match(r"\s*(\{[^}]*\}|[^,]*)", operands).group(1)
    return set(REGISTER.findall(first)), set(REGISTER.findall(operands.strip()[len(first.strip()) :]))


def follow(code, labels, start):
    """What touches the product code[start] under way: set of (index, what)."""
    operands = lists(code[start])
    sums, a = operands[0], operands[1] if len(operands) > 1 else set()
    found, seen, open_paths = set(), set(), [(start + 1, -1)]  # -1: its own group is not committed yet
    while open_paths:
        at, behind = open_paths.pop()
        while at < len(code) and (at, behind) not in seen:
            seen.add((at, behind))
            instruction = code[at]
            wait = re.search(r"wgmma\.wait_group\S* (\d+)", instruction)
            branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", instruction)
            if wait:
                if 0 <= behind and int(wait.group(1)) <= behind:
                    break
            elif "wgmma.commit_group" in instruction:
                behind = min(behind + 1, MOST_GROUPS)
            elif "wgmma.mma_async" in instruction:
                later = lists(instruction)
                if len(later) > 1 and sums & later[1]:
                    found.add((at, "sums as an A operand"))
            elif "wgmma" not in instruction:
                writes, reads = written_and_read(instruction)
                if writes & sums or reads & sums:
                    found.add((at, "sums"))
                if writes & a:
                    found.add((at, "A operand"))
                if re.search(r"(^|\s)(ret|exit)$", instruction):
                    found.add((at, "end"))
            if branch:
                open_paths.append((labels[branch.group(1)], behind))
                if not instruction.startswith("@"):
                    break
            at += 1
    return found


def main(files):
    failed = False
    for path in files:
        products = 0
        with open(path) as file:
            text = file.read()
        for name, lines in kernels(text):
            code, labels = instructions(lines)
            starts = [i for i, instruction in enumerate(code) if "wgmma.mma_async" in instruction]
            products += len(starts)
            touched = set().union(*(follow(code, labels, start) for start in starts))
            for at, what in sorted(touched):
                print(f"{path}: {name}: {what} under way: {code[at]}")
            failed = failed or bool(touched)
        print(f"{path}: {products} products")
        failed = failed or products == 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
