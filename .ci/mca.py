#!/usr/bin/env python3
"""mca.py ASSEMBLY... : called by .ci/mca. Finds the innermost loops with fused multiply-adds of the prefill kernels and prints, for
each tile and each CPU model, the FMAs of an iteration, the cycles that llvm-mca predicts, and the fraction of the FMA peak that this is:
of the model's own peak (what llvm-mca says of a list of FMAs) and of the silicon's, where the model is wrong.

Fails if a set has no score or no value loop of TILE x ROW_VECTORS accumulators (as src/kernels.rs has them), or if any of the
loops loads or stores a vector relative to the stack.
"""

import re, subprocess, sys
from collections import defaultdict
from pathlib import Path

MCA = "llvm-mca-19"
WANTED = 0.90  # of the model's peak: marked, not required

# Models for each set, with the FMAs (full vectors of the set) a cycle that the silicon does, and what is known about the model.
CPUS = {
    "avx2": {"haswell": (2, ""), "znver3": (2, "")},
    "avx512": {
        "skylake-avx512": (2, "server parts with the second 512-bit unit"),
        "sapphirerapids": (2, "LLVM 19 gives it one 512-bit FMA a cycle"),
        "znver4": (1, "512 bits in two passes of 256"),
    },
    "neon": {
        "neoverse-n1": (2, ""),
        "neoverse-v1": (4, ""),
        "apple-m1": (4, "LLVM 19 borrows the model of Cyclone (2013), which has fewer units"),
    },
}
TRIPLES = {"avx2": "x86_64", "avx512": "x86_64", "neon": "aarch64"}
REGISTER = {"avx2": r"%ymm\d+", "avx512": r"%zmm\d+", "neon": r"v\d+\.4s"}
BRANCH = re.compile(r"\s+(?:j[a-z]+|b\.[a-z]+|cbn?z|tbn?z|b)\s+(?:.*,\s*)?(\.L\w+)$")


def tile_sizes():
    """(tile, short, row_vectors) of every set."""
    source = (Path(__file__).resolve().parent.parent / "src/kernels.rs").read_text()
    found = re.findall(r"const (\w+): Self = Self \{ tile: (\d+), short: (\d+), row_vectors: (\d+)", source)
    return {name.lower(): tuple(map(int, sizes)) for name, *sizes in found}


def functions(path):
    """(name, lines) of every function with code of the prefill kernels."""
    name, lines = None, []
    for line in path.read_text().splitlines():
        if line.strip() == ".cfi_startproc":
            lines = []
        elif line.strip() == ".cfi_endproc":
            if name and "PrefillBlock" in name:
                yield name, lines
        else:
            if re.match(r"_R\w+:$", line):
                name = line[:-1]
            lines.append(line)


def innermost_loops(lines):
    """Instructions of each innermost loop."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    jumps = [(labels[m[1]], i) for i, line in enumerate(lines) if (m := BRANCH.match(line)) and labels.get(m[1], i) < i]
    for first, last in jumps:
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in jumps):
            yield [line.strip() for line in lines[first : last + 1] if re.match(r"\s+[a-z]", line)]


class Loop:
    """An innermost loop of FMAs, or `None` in `shape` where it is none of a tile."""

    def __init__(self, instruction_set, body, has_frame_pointer):
        self.body, register = body, REGISTER[instruction_set]
        x86 = instruction_set != "neon"
        if x86:
            fmas = [line for line in body if re.match(rf"vfn?m(add|sub)\d+ps\s.*{register}$", line)]
            accumulators = {line.split()[-1] for line in fmas}
            rows = [line for line in body if re.match(rf"vmov[au]p[sd]\s+.*\(.*\), {register}$", line)]
            rows += [line for line in fmas if re.search(r"\(", line) and "{1to" not in line]
            scalars = [line for line in body if line.startswith("vbroadcastss") or "{1to" in line]
            neighbours = [line for line in scalars if re.search(r"\s-?\d+\(%r\w+\)", line)]
        else:
            fmas = [line for line in body if re.match(rf"fmla\s+{register}", line)]
            accumulators = {line.split()[1] for line in fmas}
            rows = [line for line in body for _ in range(1 + line.startswith("ldp")) if re.match(r"ld[pru]+\s+q\d+", line)]
            scalars = [line for line in body for _ in range(1 + line.startswith("ldp")) if re.match(r"ld1r|ld[pru]+\s+s\d+", line)]
            neighbours = [line for line in scalars if "#" in line]
        self.fmas = len(fmas)
        # The same without memory operands.
        self.bare_fmas = [re.sub(r"-?\d*\([^)]*\)(\{1to\d+\})?", register.replace(r"\d+", "15"), line) for line in fmas]
        self.shape = None
        if len(accumulators) >= 8 and rows:
            self.unrolled = self.fmas // len(accumulators)
            row_vectors = len(rows) // self.unrolled
            self.shape = (len(accumulators) // row_vectors, row_vectors) if row_vectors else None
        # The value tile's scalars are neighbours in memory, the score tile's are a row apart.
        self.kind = "value" if 2 * len(neighbours) > len(scalars) else "score"
        stack = r"\(%rsp|\(%rbp" if has_frame_pointer else r"\(%rsp"
        vector = r"%[xyz]mm" if x86 else r"\b[qvds]\d+"
        self.spills = [line for line in body if re.search(stack if x86 else r"\[(sp|x29)\b", line) and re.search(vector, line)]


def mca(instruction_set, cpu, body, iterations, line):
    """The number on a line of the summary."""
    command = [MCA, f"-mtriple={TRIPLES[instruction_set]}", f"-mcpu={cpu}", f"-iterations={iterations}"]
    done = subprocess.run([*command, "-instruction-info=0", "-resource-pressure=0"], input="\n".join(body) + "\n", capture_output=True, text=True)
    found = re.search(rf"{line}:\s+([\d.]+)", done.stdout)
    if not found:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return float(found[1])


def cycles(instruction_set, cpu, body):
    """Cycles of an iteration in the steady state."""
    few, many = (mca(instruction_set, cpu, body, iterations, "Total Cycles") for iterations in (200, 600))
    return (many - few) / 400


def rate(instruction_set, cpu, fmas):
    """FMAs a cycle that the model's units take, whatever their latency."""
    return len(fmas) / mca(instruction_set, cpu, fmas, 100, "Block RThroughput")


def peak(instruction_set, cpu):
    """The model's rate of plain FMAs. Its rate of by-element ones may be another."""
    fma = {
        "avx2": "vfmadd231ps %ymm15, %ymm14, %ymm{}",
        "avx512": "vfmadd231ps %zmm31, %zmm30, %zmm{}",
        "neon": "fmla v{}.4s, v30.4s, v31.4s",
    }[instruction_set]
    return rate(instruction_set, cpu, [fma.format(i) for i in range(12)])


def main():
    loops, problems = defaultdict(lambda: defaultdict(list)), []
    for path in map(Path, sys.argv[1:]):
        for name, lines in functions(path):
            text = "\n".join(lines)
            has_frame_pointer = "movq\t%rsp, %rbp" in text
            for body in innermost_loops(lines):
                joined = "\n".join(body)
                if "fmla" in joined:
                    instruction_set = "neon"
                elif "vfmadd" in joined:
                    instruction_set = "avx512" if "%zmm" in joined else "avx2"
                else:
                    continue
                loop = Loop(instruction_set, body, has_frame_pointer)
                if loop.shape:
                    loops[instruction_set][loop.kind, loop.shape].append(loop)
                    for line in loop.spills:
                        problems.append(f"{instruction_set} {loop.kind} {loop.shape}: on the stack: {line}")

    sizes = tile_sizes()
    for instruction_set, cpus in CPUS.items():
        tile, short, row_vectors = sizes[instruction_set]
        for kind in ("score", "value"):
            complete = [loop for loop in loops[instruction_set][kind, (tile, row_vectors)] if loop.fmas >= tile * row_vectors]
            if not complete:
                problems.append(f"{instruction_set}: no {kind} loop with {tile} x {row_vectors} FMAs")
        for cpu, (silicon, remark) in cpus.items():
            model = peak(instruction_set, cpu)
            differs = abs(model - silicon) > 0.05
            print(f"\n{instruction_set} on {cpu}: {model:.2f} FMAs a cycle in the model, {silicon} in silicon"
                  + (f" ({remark})" if remark else ""))
            print("  tile            copies  FMAs  cycles  of the model's peak" + ("  of the silicon's" if differs else ""))
            def largest_first(item):
                (kind, (height, vectors)), _ = item
                return kind, -height * vectors, -vectors

            for (kind, (height, vectors)), copies in sorted(loops[instruction_set].items(), key=largest_first):
                # The slowest of the copies that inlining made.
                results = []
                for loop in copies:
                    best_rate = max(model, rate(instruction_set, cpu, loop.bare_fmas))
                    loop_cycles = cycles(instruction_set, cpu, loop.body)
                    results.append((loop.fmas / loop_cycles / best_rate, loop.fmas, loop_cycles))
                fraction, fmas, slowest = min(results)
                full = (height, vectors) == (tile, row_vectors)
                print(f"  {kind} {height:2} x {vectors}{' full' if full else '     '}  {len(copies):8}  {fmas:4}  {slowest:6.2f}  {fraction:8.2f}"
                      + (f"  {fmas / slowest / silicon:28.2f}" if differs else "")
                      + (f"  below {WANTED}" if full and fraction < WANTED else ""))
    if problems:
        sys.exit("\n" + "\n".join(problems))
    print("\nno inner loop touches the stack")


main()
