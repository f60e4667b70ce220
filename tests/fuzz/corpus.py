"""Writes the seed corpora of the fuzz targets: small files that get far into each reader. Run by hand when a format
changes; the files are in the tree."""

import json
import pathlib
import random
import struct

here = pathlib.Path(__file__).parent / "corpus"


def put(target, name, data):
    (here / target).mkdir(parents=True, exist_ok=True)
    (here / target / name).write_bytes(data)


def npy(descr, order, shape, data, major=1):
    text = "{'descr': %r, 'fortran_order': %s, 'shape': %s, }" % (descr, order, shape)
    head = text.encode() + b" " * (53 - len(text) % 64 if major == 1 else 51 - len(text) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([major, 0]) + struct.pack("<H" if major == 1 else "<I", len(head)) + head + data


put("npy", "f2", npy("<f2", False, "(2, 3)", bytes(12)))
put("npy", "f4", npy("<f4", False, "(1, 2, 2, 1)", struct.pack("<4f", 0, 1, -2.5, 1e30)))
put("npy", "f8-v2", npy("<f8", False, "(2,)", struct.pack("<2d", 1, 2), 2))
put("npy", "bool", npy("|b1", False, "(5,)", bytes([0, 1, 1, 0, 1])))
put("npy", "fortran", npy("<f4", True, "(2, 2)", bytes(16)))
put("npy", "scalar", npy("<f4", False, "()", bytes(4)))
put("npy", "empty", npy("<f4", False, "(0, 7)", b""))


def safetensors(header, data):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(text)) + text + data


put("safetensors", "one", safetensors({"x": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}}, bytes(12)))
put("safetensors", "bf16", safetensors({"__metadata__": {"a": "b"}, "y": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}, bytes(6)))
put("safetensors", "two", safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "I64", "shape": [1], "data_offsets": [4, 12]}}, bytes(12)))
put("safetensors", "escapes", safetensors(b'{"\\u00e9\\n": {"shape":[],"dtype":"F64","data_offsets":[0,8]}}', bytes(8)))
put("safetensors", "nested", safetensors(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":[[[{"a":[1,-2.5e3,true,null]}]]]}}', bytes(4)))

put("dump", "small", struct.pack("<6i", 2, 3, 2, 1, 2, 1) + bytes(2 * (2 * 2 * 2 + 2 * 3 * 2)))
put("dump", "one", struct.pack("<6i", 1, 1, 1, 1, 1, 0) + bytes(6))
put("dump", "huge", struct.pack("<6i", 2**31 - 1, 2**31 - 1, 64, 8, 128, 0))

put("json", "object", b'{"a": 12, "b": [1, 2.5e-3, {"c": null}], "d\\u0041": "x\\\\", "e": true}')
put("json", "array", b"[[[[[[0]]]], \"\\ud83d\\ude00\"]]")
put("json", "edges", b'{"n":9223372036854775807,"m":9223372036854775808,"":{}}')

rng = random.Random(1)
for i in range(12):
    put("attention", f"choices{i}", b"".join(struct.pack("<H", rng.choice([0, 1, 2, 3, 5, 60, 80, 95, 99, 1000])) for _ in range(90)))
for i in range(8):
    dims = bytes([2, 2, 3, 4])
    tensor = bytes([1 + i % 3, 0]) + dims
    put("descriptors", f"sound{i}", bytes([1 + i % 2, i]) + tensor * 5 + bytes([0, 5, 3, 1]) + bytes([1, 1 + i % 3, 1, 1, 1, 1, i * 37 % 127]) + bytes(range(40)))
