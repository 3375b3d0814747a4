#!/usr/bin/env python3
"""mca.py ASSEMBLY... : called by .ci/mca. Finds the innermost loops with fused multiply-adds of the prefill kernels and prints, for
each tile and each CPU model, the FMAs of an iteration, the cycles that the model's front end and units need at least, the cycles that
llvm-mca predicts, and the fraction of the model's own FMA peak (what llvm-mca says of a list of FMAs) that this is. Where the silicon does
more FMAs a cycle than the model: the cycles that the FMAs take there, beside those that the model needs for all the other instructions.

Products of pairs of bf16 (avx512-bf16) have no turn here; .ci/loops looks at them.

Fails if a set has no score or no value loop of TILE x ROW_VECTORS accumulators (as src/kernels.rs has them), or if any of the
loops loads or stores a vector relative to the stack.
"""

import re, subprocess, sys
from collections import defaultdict

sys.dont_write_bytecode = True  # no cache among the sources
from find_loops import find_loops, tile_sizes

MCA = "llvm-mca-19"
WANTED = 0.90  # of the model's peak: marked, not required

# Models for each set, with the FMAs (full vectors of the set) a cycle that the silicon does, and what is known about the model.
CPUS = {
    "avx2": {"haswell": (2, ""), "znver3": (2, "")},
    "avx512": {
        "skylake-avx512": (2, "server parts with the second 512-bit unit"),
        "sapphirerapids": (2, "LLVM 19 gives it one 512-bit FMA a cycle"),
        "znver4": (1, "512 bits in two passes of 256; broadcasting loads take unit FP1 or FP2, FMAs FP0 or FP1:\n"
                   "  FP2 could take all of them, but llvm-mca spreads them over both, and predicts more cycles than the units need"),
    },
    "neon": {
        "neoverse-n1": (2, ""),
        "neoverse-v1": (4, ""),
        "apple-m1": (4, "LLVM 19 borrows the model of Cyclone (2013), which has fewer units"),
    },
}
TRIPLES = {"avx2": "x86_64", "avx512": "x86_64", "neon": "aarch64"}


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


def least_cycles(instruction_set, cpu, body):
    """Cycles of an iteration if llvm-mca always chose the right unit, and nothing waited for a result."""
    return mca(instruction_set, cpu, body, 100, "Block RThroughput")


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


def bare_fmas(loop):
    """Its FMAs without memory operands."""
    fmas = [line for line in loop.body if re.match(r"vfn?m(add|sub)|fml[as]", line)]
    register = "%zmm15" if loop.instruction_set == "avx512" else "%ymm15"
    return [re.sub(r"-?\d*\([^)]*\)(\{1to\d+\})?", register, line) for line in fmas]


def without_fmas(loop):
    """The other instructions, and the loads that were operands of FMAs."""
    register = "%zmm15" if loop.instruction_set == "avx512" else "%ymm15"
    body = []
    for line in loop.body:
        if not re.match(r"vfn?m(add|sub)|fml[as]", line):
            body.append(line)
        elif operand := re.search(r"-?\d*\([^)]*\)", line):
            body.append(f"vmovups {operand[0]}, {register}")
    return body


def main():
    loops, problems = defaultdict(lambda: defaultdict(list)), []
    for loop in find_loops(sys.argv[1:]):
        if loop.instruction_set in CPUS and loop.shape and loop.shape[0] * loop.shape[1] >= 8:
            loops[loop.instruction_set][loop.kind, loop.shape].append(loop)
            problems += [f"{loop.instruction_set} {loop.kind} {loop.shape}: on the stack: {line}" for line in loop.vector_spills]

    sizes = tile_sizes()
    for instruction_set, cpus in CPUS.items():
        tile, short, row_vectors = sizes[instruction_set]
        for kind in ("score", "value"):
            complete = [loop for loop in loops[instruction_set][kind, (tile, row_vectors)] if loop.multiply_adds >= tile * row_vectors]
            if not complete:
                problems.append(f"{instruction_set}: no {kind} loop with {tile} x {row_vectors} FMAs")
        for cpu, (silicon, remark) in cpus.items():
            model = peak(instruction_set, cpu)
            differs = abs(model - silicon) > 0.05
            print(f"\n{instruction_set} on {cpu}: {model:.2f} FMAs a cycle in the model, {silicon} in silicon"
                  + (f" ({remark})" if remark else ""))
            print("  tile            copies  FMAs   least  cycles  of the model's peak" + ("  FMAs in silicon  the rest" if differs else ""))
            def largest_first(item):
                (kind, (height, vectors)), _ = item
                return kind, -height * vectors, -vectors

            for (kind, (height, vectors)), copies in sorted(loops[instruction_set].items(), key=largest_first):
                # The slowest of the copies that inlining made.
                results = []
                for loop in copies:
                    best_rate = max(model, rate(instruction_set, cpu, bare_fmas(loop)))
                    loop_cycles = cycles(instruction_set, cpu, loop.body)
                    rest = cycles(instruction_set, cpu, without_fmas(loop))
                    least = least_cycles(instruction_set, cpu, loop.body)
                    results.append((loop.multiply_adds / loop_cycles / best_rate, loop.multiply_adds, least, loop_cycles, rest))
                fraction, fmas, least, slowest, rest = min(results)
                full = (height, vectors) == (tile, row_vectors)
                print(f"  {kind} {height:2} x {vectors}{' full' if full else '     '}  {len(copies):8}  {fmas:4}  {least:6.2f}  {slowest:6.2f}  {fraction:8.2f}"
                      + (f"  {fmas / silicon:28.2f}  {rest:8.2f}" if differs else "")
                      + (f"  below {WANTED}" if full and fraction < WANTED else ""))
    if problems:
        sys.exit("\n" + "\n".join(problems))
    print("\nno inner loop touches the stack")


main()
