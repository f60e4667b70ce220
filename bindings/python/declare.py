"""Turns the public C headers into apa_attention/_declarations.py, the package's view of the C library.

The headers stay the only place where the interface is written down: their declarations are cut out as they are and
given to cffi, which lays the structs out as the platform's C compiler does and writes a module that needs no parser
(and no compiler) when it is imported.

    declare.py INCLUDE_DIR OUT.py
"""

import re
import sys
from pathlib import Path

import cffi

FIRST = ["apa.h", "eval.h", "cuda.h"]  # the rest follows by name
LEFT_OUT = {"io.h", "dist.h", "dist_nccl.h"}  # numpy reads files; libraries of their own, over MPI and NCCL

# DLPack's exchange struct (https://dmlc.github.io/dlpack/latest/c_api.html), unversioned: what a capsule "dltensor" holds.
DLPACK = """
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape; int64_t *strides; uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
    DLTensor dl_tensor; void *manager_ctx; void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
"""


def ordered(include: Path) -> list[Path]:
    """Every header once, after the headers that it includes."""
    done: list[Path] = []

    def visit(path: Path) -> None:
        if path in done or path.name in LEFT_OUT:
            return
        for name in re.findall(r'^#include "apa/(.+)"', path.read_text("utf-8"), re.M):
            visit(path.parent / name)
        if path not in done:
            done.append(path)

    folder = include / "apa"
    for path in [folder / name for name in FIRST] + sorted(folder.glob("*.h")):
        visit(path)
    return done


def declarations(text: str) -> str:
    """What cffi can read of a header: no comments, no C++, no preprocessor but whole numbers by name."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^#ifdef __cplusplus.*?^#endif", "", text, flags=re.S | re.M)
    text = text.replace("\\\n", " ")
    number = re.compile(r"#define \w+ \d+\s*")
    lines = [line for line in text.splitlines() if not line.startswith("#") or number.fullmatch(line)]
    return "\n".join(line for line in lines if line.strip()).replace("APA_EXPORT ", "")


def main(include: str, out: str) -> None:
    headers = ordered(Path(include))
    ffi = cffi.FFI()
    for path in headers:
        ffi.cdef(declarations(path.read_text("utf-8")))
    ffi.cdef(DLPACK)
    ffi.set_source("apa_attention._declarations", None)
    ffi.emit_python_code(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
