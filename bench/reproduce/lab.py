"""What the reproductions share: data, calls of the command `apa`, tables, and pages that are filled in with measured text.

A reproduction is a script beside this file. It makes its inputs (a slice of a dump, `apa gen`, or arrays of its own) under the
work folder, runs `apa`, and hands each table to page.put(name, text). Without --write the tables are printed; with --write
they replace what stands between `<!-- measured: NAME -->` and `<!-- end -->` in docs/reproduce/PAGE.md, and plots
are written beside it. So no figure of a page is typed by hand. Python's standard library only."""
import argparse
import array
import json
import math
import os
import random
import re
import struct
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SAMPLE = os.path.join(ROOT, "data", "smollm2-135m_L17_h0_12288.dump")


class Lab:
    def __init__(self, page, about):
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--apa", default=os.path.join(ROOT, "build", "apa"), help="the command (default build/apa)")
        parser.add_argument("--dumps", default=os.path.join(ROOT, "dumps"),
                            help="folder that data/make_dumps.sh --out filled (default dumps)")
        parser.add_argument("--work", default=os.path.join(ROOT, "build", "reproduce"), help="folder for inputs that are made")
        parser.add_argument("--write", action="store_true", help=f"fill docs/reproduce/{page}.md in")
        parser.add_argument("--only", help="only the parts whose name begins so")
        self.options = parser.parse_args()
        self.folder = os.path.join(ROOT, "docs", "reproduce")
        self.page = os.path.join(self.folder, page + ".md")
        self.name = page
        os.makedirs(self.options.work, exist_ok=True)

    def wants(self, part):
        return not self.options.only or part.startswith(self.options.only)

    # ---- the command ----

    def apa(self, *arguments):
        command = [self.options.apa] + [str(a) for a in arguments]
        print("+ apa " + " ".join(os.path.basename(a) if os.sep in a else a for a in command[1:]), file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(f"apa {arguments[0]}: status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments):
        return json.loads(self.apa(*arguments, "--json", "-"))

    def evaluate(self, inputs, method, *more, settings=()):
        chosen = [word for s in settings for word in ("--set", s)]
        return json.loads(self.apa("eval", *inputs, "--method", method, "--repeats", 1, "--json", "-", *chosen, *more))

    def sweep(self, inputs, *more, settings=()):
        """Rows of `apa sweep`, refused ones included (their figures are None)."""
        chosen = [word for s in settings for word in ("--set", s)]
        return json.loads(self.apa("sweep", *inputs, "--json", "-", *chosen, *more))["rows"]

    # ---- inputs ----

    def work(self, name):
        return os.path.join(self.options.work, name)

    def generate(self, kind, shape, dtype="f16", seed=None, causal=None):
        """Inputs of `apa gen`, made once; returns the options that name them."""
        name = f"{kind}_{shape.replace(',', 'x')}_{dtype}" + (f"_{seed}" if seed is not None else "")
        folder = self.work(name)
        if not os.path.exists(os.path.join(folder, "v.npy")):
            self.apa("gen", kind, "--out", folder, "--shape", shape, "--dtype", dtype,
                     *(("--seed", seed) if seed is not None else ()))
        return self.arrays(folder, causal)

    @staticmethod
    def arrays(folder, causal=None):
        found = [word for x in "qkv" for word in ("--" + x, os.path.join(folder, x + ".npy"))]
        return found + ([] if causal is None else ["--causal" if causal else "--no-causal"])

    def dump(self, name):
        """A file that data/make_dumps.sh makes; None, with a note, where it is not there."""
        path = os.path.join(self.options.dumps, name)
        if os.path.exists(path):
            return path
        print(f"{path} is not there: data/make_dumps.sh --out {self.options.dumps} makes it", file=sys.stderr)
        return None

    def slice(self, path, queries, kv_head=None):
        """The last `queries` queries of a dump, and one KV head with its query heads if asked for; all keys stay."""
        name = os.path.splitext(os.path.basename(path))[0] + f"_last{queries}" + ("" if kv_head is None else f"_kv{kv_head}")
        out = self.work(name + ".dump")
        if not os.path.exists(out):
            slice_dump(path, out, queries, kv_head)
        return ["--dump", out]

    def write_arrays(self, name, **arrays):
        """q, k, v as float32 .npy in a folder of their own: each (shape, flat array('f'))."""
        folder = self.work(name)
        os.makedirs(folder, exist_ok=True)
        for key, (shape, values) in arrays.items():
            write_npy(os.path.join(folder, key + ".npy"), shape, values)
        return folder

    # ---- pages ----

    def put(self, name, text):
        print(f"\n[{name}]\n{text}", flush=True)
        if not self.options.write:
            return
        page = open(self.page, encoding="utf-8").read()
        pattern = re.compile(rf"(<!-- measured: {re.escape(name)} -->\n).*?(<!-- end -->)", re.S)
        page, found = pattern.subn(lambda m: m[1] + "\n" + text.strip() + "\n\n" + m[2], page)
        if found != 1:
            sys.exit(f"{self.page}: {found} places named {name}")
        with open(self.page, "w", encoding="utf-8") as file:
            file.write(page)

    def plot(self, name, svg):
        if self.options.write:
            with open(os.path.join(self.folder, name + ".svg"), "w", encoding="utf-8") as file:
                file.write(svg)


def slice_dump(path, out, queries, kv_head=None):
    with open(path, "rb") as file:
        n, kv, nh, nkv, hd, off = struct.unpack("<6i", file.read(24))
        q, k, v = (array.array("H", file.read(2 * size)) for size in (n * nh * hd, kv * nkv * hd, kv * nkv * hd))
    queries, group = min(queries, n), nh // nkv
    q = q[(n - queries) * nh * hd:]
    if kv_head is not None:
        q = pick(q, queries, nh * hd, kv_head * group * hd, group * hd)
        k, v = (pick(x, kv, nkv * hd, kv_head * hd, hd) for x in (k, v))
        nh, nkv = group, 1
    with open(out + ".part", "wb") as file:
        file.write(struct.pack("<6i", queries, kv, nh, nkv, hd, off + n - queries))
        for x in (q, k, v):
            x.tofile(file)
    os.replace(out + ".part", out)


def pick(values, rows, width, start, count):
    out = array.array(values.typecode)
    for r in range(rows):
        out.extend(values[r * width + start: r * width + start + count])
    return out


def write_npy(path, shape, values):
    assert values.typecode == "f" and len(values) == math.prod(shape)
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + values.tobytes())


def read_npy(path):
    """(shape, values) of a float32 .npy in C order."""
    with open(path, "rb") as file:
        raw = file.read()
    size = struct.unpack("<H", raw[8:10])[0]
    head = raw[10:10 + size].decode()
    assert "'<f4'" in head and "False" in head
    shape = tuple(int(x) for x in re.search(r"\(([^)]*)\)", head)[1].split(",") if x.strip())
    return shape, array.array("f", raw[10 + size:])


def normals(rng, count, factor=1.0):
    return array.array("f", (factor * rng.gauss(0, 1) for _ in range(count)))


def rng(seed):
    return random.Random(seed)


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(c) for c in row) + " |" for row in rows])


def sci(x, digits=2):
    """3.1e-3 in the few characters that a table has room for."""
    if x is None:
        return "-"
    if x == 0 or x >= 0.01:
        return f"{x:.{digits + 1}g}"
    return f"{x:.{digits - 1}e}".replace("e-0", "e-")


def percent(x, digits=1):
    return "-" if x is None else f"{100 * x:.{digits}f} %"
