"""Registers, shared memory and spills of every Triton kernel, compiled for GPUs that need not be here.

    PYTHONPATH=. python benchmarks/kernel_resources.py            # a table, then JSON as the last line
    PYTHONPATH=. python benchmarks/kernel_resources.py --write docs/kernels.md
    PYTHONPATH=. python benchmarks/kernel_resources.py --quick    # variants of attention for sm_90 only

Each host function is called on small CPU tensors, and what it would launch is compiled instead, with the
tiles of `kernels/triton/configs.py`; NVIDIA's cuobjdump, which comes with Triton, reads the binaries.
`--write` puts the table between the file's two marks.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import kernel_cases as cases
import kernel_inputs as inputs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.triton import configs

ARCHES = (80, 90, 100)
SIZE = inputs.Size(((64, 100),), 2, 1000, 32, 8, 128, 16, 64, 4096, 14_336, 128_256, 2, 4)
DIMS = (64, 80, 96, 128, 256)
WIDE = re.compile(r"(?:ld|st)\.global\S*\.(?:v4\.b32|v2\.b64)|cp\.async\.\S+ \[[^;]*0x10")
MARK = "<!-- kernel_resources -->"
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="a Markdown file with two marks to put the table between")
    parser.add_argument(
        "--quick", action="store_true", help="variants of attention for one architecture only"
    )
    arguments = parser.parse_args()
    rows = [row for arch in ARCHES for row in resources(arch, arguments.quick and arch != 90)]
    table = markdown(rows)
    print(table)
    if arguments.write:
        before, _, after = arguments.write.read_text().split(MARK)
        arguments.write.write_text(f"{before}{MARK}\n{table}\n{MARK}{after}")
    print(json.dumps({"triton": triton.__version__, "kernels": rows}))


def resources(arch, quick):
    """One row a kernel: its case, name and architecture, registers a thread, bytes of shared memory, spilled
    bytes, and how many instructions in its code read or write 16 bytes of global memory.
    """
    configs.gpu_class = lambda device: f"sm_{arch}"
    configs.converts_float8 = lambda device: arch >= 89
    rows = []
    for name, kernel, signature, constants, attributes, options in launches(quick):
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, spilled = usage(compiled.asm["cubin"])
        rows.append({
            "case": name, "kernel": kernel.__name__, "arch": arch, "warps": compiled.metadata.num_warps,
            "registers": registers, "shared": compiled.metadata.shared, "spilled": spilled,
            "wide": len(WIDE.findall(compiled.asm["ptx"])),
        })  # fmt: skip
    return rows


def launches(quick):
    """What the cases launch, as arguments of the compiler; every kernel of a case once."""
    found, case = {}, None

    def record(self, *args, grid, warmup, **kwargs):
        found.setdefault((case, self.__name__), described(self, args, kwargs))

    device, dtype = torch.device("cpu"), torch.bfloat16
    JITFunction.run = record
    for build in builders(quick, device, dtype):
        # What building launches (staging, say) belongs to no case.
        case = None
        made = build()
        case = made.name
        made.run()
    return [(name, *parts) for (name, _), parts in found.items() if name is not None]


def builders(quick, device, dtype):
    size = SIZE
    for make in (cases.prefill, cases.decode):
        for dim in [128] if quick else DIMS:
            yield lambda make=make, dim=dim: make(size, device, dtype, dim=dim)
        if quick:
            continue
        yield lambda make=make: make(size, device, dtype, window=600, softcap=20.0)
        yield lambda make=make: make(size, device, dtype, float8=True)
        for dim in (64, 128, 256):
            yield lambda make=make, dim=dim: renamed(make(size, device, torch.float32, dim=dim), "float32")
    yield from cases.small_builders(size, device, dtype)


def renamed(case, extra):
    return inputs.Case(case.name.replace(")", f", {extra})"), case.run, case.truth, case.moved)


def described(kernel, args, kwargs):
    """Kernel, signature, constants, attributes and options, as Triton's launcher would specialize them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given.pop(parameter.name)
        varies, unaligned = parameter.do_not_specialize, parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not varies):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = type_name(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0 and not varies and not unaligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return kernel, signature, constants, attributes, given


def type_name(value):
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def usage(binary):
    """Registers and bytes of stack a thread, the latter being what is spilled; from the binary itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return int(found[0]), int(found[1])


def markdown(rows):
    """Rows by kernel; registers / bytes of shared memory for each architecture."""
    by_case = {}
    for row in rows:
        cell = f"{row['registers']} / {row['shared']:,}" + (f" / {row['spilled']}" if row["spilled"] else "")
        by_case.setdefault((row["case"], row["kernel"], row["warps"]), {})[row["arch"]] = cell
    merged = {}
    for (case, kernel, warps), cells in by_case.items():
        merged.setdefault((case, kernel), []).append((warps, cells))
    lines = ["| case | kernel | sm_80 | sm_90 | sm_100 |", "|---|---|---|---|---|"]
    for (case, kernel), variants in merged.items():
        cells = {arch: f"{cell} ({warps})" for warps, found in variants for arch, cell in found.items()}
        lines.append(f"| {case} | `{kernel}` | {' | '.join(cells.get(arch, '') for arch in ARCHES)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
