#!/usr/bin/env python3
""".ci/find-loops.py [--text] FILE: the inner loops of the kernels in an x86-64 object, library or program, as JSON (or to be read).

Works on what `objdump` shows of compiled code: an inner loop is a backward jump inside a function, with no other inside. For each:

    set             avx2 | avx512 | portable (all of Scalar128b, 256b and 512b: they share their functions)
    kind            score | value: a micro-tile; exp: the polynomial of the softmax step; else other
    height, width   of a micro-tile: keys or value dims (broadcasts), vectors of rows (loads)
    multiply_adds   FMAs, or on the portable set pairs of mulps and addps
    vector_spills   instructions that move vector registers from or to the stack
    scalar_reloads  other instructions that touch the stack: a spilled loop bound or stride
    function, address, instructions (AT&T; the jump back goes to the label `loop`)

The two products are told apart by what they broadcast: a value tile takes neighbours in memory, a score tile one element of
each key. Everything else is counted, not guessed; a compiler that unrolls changes `height` and `multiply_adds`.
"""

import json, re, subprocess, sys


def disassemble(file):
    """(symbol, [(address, instruction)]) of each function."""
    command = ["objdump", "--disassemble", "--wide", "--no-show-raw-insn", file]
    function = None
    for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if function:
                yield function
            function = (start[1], [])
        elif function and (instruction := re.match(r"\s+([0-9a-f]+):\s+(.*?)\s*$", line)):
            function[1].append((int(instruction[1], 16), instruction[2]))
    if function:
        yield function


def instruction_set(symbol):
    if "4pulp3x862v3" in symbol:
        return "avx2"
    if "4pulp3x862v4" in symbol:
        return "avx512"
    return "portable" if "fused_attention" in symbol or "4pulp" in symbol else None


def inner_loops(code):
    """Instructions of each loop that has no other inside, the jump back last."""
    loops = set()
    for address, instruction in code:
        jump = re.match(r"j\w+\s+([0-9a-f]+)\b", instruction)
        if jump and code[0][0] <= int(jump[1], 16) <= address:
            loops.add((int(jump[1], 16), address))
    for first, last in sorted(loops):
        if not any(other != (first, last) and first <= other[0] and other[1] <= last for other in loops):
            yield [(address, instruction) for address, instruction in code if first <= address <= last]


def count(pattern, instructions):
    return sum(bool(re.match(pattern, instruction)) for instruction in instructions)


def broadcasts(instructions):
    """Memory operands (displacement, registers) of the elements that are broadcast."""
    operands = []
    for instruction in instructions:
        if re.match(r"(vbroadcastss|movss) .*\(.*\),%|.*\{1to\d+\}", instruction):
            operand = re.search(r"(-?0x[0-9a-f]+)?\(([^)]*)\)", instruction)
            operands.append((int(operand[1] or "0", 16), operand[2]))
    return operands


def describe(symbol, uses_frame_pointer, loop):
    instructions = [instruction for _, instruction in loop]
    elements = broadcasts(instructions)
    multiplies, adds = count(r"v?mulps", instructions), count(r"v?addps", instructions)
    multiply_adds = count(r"vfn?m(add|sub)\d+ps", instructions) or min(multiplies, adds)
    loads = count(r"v?mov[au]ps [^%]*\(.*\),%", instructions)
    stores = count(r"v?mov[au]ps %", instructions) - count(r"v?mov[au]ps %.*,%[xyz]mm\d+$", instructions)
    # Where rbp is no frame pointer it is a register like any other.
    on_stack = [i for i in instructions if re.search(r"\(%rsp|\(%rbp" if uses_frame_pointer else r"\(%rsp", i)]
    vector_spills = [i for i in on_stack if re.search(r"%[xyz]mm", i)]

    kind = "other"
    if len(elements) > 1 and loads and not stores and multiply_adds >= len(elements) * loads:
        first = min(displacement for displacement, _ in elements)
        neighbours = [first + 4 * i for i in range(len(elements))] == sorted(displacement for displacement, _ in elements)
        kind = "value" if neighbours and len({registers for _, registers in elements}) == 1 else "score"
    elif multiply_adds >= 4 and stores and count(r"v?pslld", instructions):
        kind = "exp"
    return {
        "set": instruction_set(symbol),
        "kind": kind,
        "height": len(elements) if kind in ("score", "value") else 0,
        "width": loads if kind in ("score", "value") else 0,
        "multiply_adds": multiply_adds,
        "vector_spills": len(vector_spills),
        "scalar_reloads": len(on_stack) - len(vector_spills),
        "function": symbol,
        "address": f"{loop[0][0]:x}",
        "instructions": instructions[:-1] + [re.sub(r"(j\w+) .*", r"\1 loop", instructions[-1])],
    }


def find(file):
    loops = []
    for symbol, code in disassemble(file):
        if code and instruction_set(symbol):
            uses_frame_pointer = any(re.match(r"mov +%rsp,%rbp", i) for _, i in code[:12])
            loops += [describe(symbol, uses_frame_pointer, loop) for loop in inner_loops(code)]
    return [loop for loop in loops if loop["multiply_adds"]]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    found = find(sys.argv[-1])
    if "--text" in sys.argv:
        for loop in found:
            print(*(f"{key}={value}" for key, value in loop.items() if key != "instructions"))
            print(*(f"    {instruction}" for instruction in loop["instructions"]), sep="\n")
    else:
        json.dump(found, sys.stdout, indent=1)
