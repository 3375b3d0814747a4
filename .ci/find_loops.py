"""The inner loops of the kernels in a release build: for the scripts beside it to import.

Reads what `cargo rustc --release --lib -- --emit asm` leaves. With `-C symbol-mangling-version=v0` symbols name not only the
instruction set but also the operation, and only the prefill kernels are looked at; the compiler then cuts the crate
differently, though, and may give a loop other registers than users get.
"""

import re
from pathlib import Path

# What multiplies and adds full registers. On the portable set every multiplication has one addition.
X86_MULTIPLY_ADD = {
    "avx512": r"vfn?m(add|sub)\d+ps\s.*%zmm\d+$",
    "avx512_bf16": r"vdpbf16ps\s.*%zmm\d+$",
    "avx512_f64": r"vfn?m(add|sub)\d+pd\s.*%zmm\d+$",
    "avx2": r"vfn?m(add|sub)\d+ps\s.*%ymm\d+$",
    "avx2_f64": r"vfn?m(add|sub)\d+pd\s.*%ymm\d+$",
    "portable": r"addps\s",
    "portable_f64": r"addpd\s",
}
BRANCH = re.compile(r"(?:j[a-z]+|b\.[a-z]+|cbn?z|tbn?z|b)\s+(?:.*,\s*)?(\.L\w+)$")


def tile_sizes():
    """(tile, short, row_vectors) of every set, from the table in the source. (AVX512-BF16 is AVX-512 with other score tiles.)"""
    source = (Path(__file__).resolve().parent.parent / "src/kernels.rs").read_text()
    found = re.findall(r"const (\w+): Self = Self \{ tile: (\d+), short: (\d+), row_vectors: (\d+)", source)
    sizes = {name.lower(): tuple(map(int, sizes)) for name, *sizes in found}
    return {**sizes, "avx512_bf16": sizes["avx512"]}


class Loop:
    """An innermost loop.

    instruction_set  as the library calls it, with "_f64" where it computes in f64 (x86 alone); the portable sets share their functions and
                     are all "portable" here
    kind             score | value | exp (of the softmax step) | other
    shape            of a score or value tile: (keys or value dims, vectors of rows), else None
    multiply_adds    of one iteration, which covers several features or keys where the compiler unrolled
    vector_spills    instructions that move a vector (on x86: more than one element) from or to the stack
    scalar_reloads   other instructions that touch the stack: a loop bound or a stride that found no register
    body             the instructions
    """

    def __init__(self, instruction_set, body, has_frame_pointer):
        self.instruction_set, self.body = instruction_set, body
        # Where rbp is no frame pointer it is a register like any other.
        stack = r"\[(sp|x29)\b" if instruction_set == "neon" else r"\(%rsp|\(%rbp" if has_frame_pointer else r"\(%rsp"
        vector = r"\b[qvds]\d+" if instruction_set == "neon" else r"%[xyz]mm"
        on_stack = [line for line in body if re.search(stack, line)]
        single = r"v?\w+s[sd]\s[^yz]*$"
        self.vector_spills = [line for line in on_stack if re.search(vector, line) and not re.match(single, line)]
        self.scalar_reloads = [line for line in on_stack if line not in self.vector_spills]

        operands = operands_neon if instruction_set == "neon" else operands_x86
        accumulators, rows, scalars = operands(instruction_set, [line for line in body if line not in on_stack])
        registers, self.multiply_adds = len(set(accumulators)), len(accumulators)
        self.kind, self.shape = "other", None
        if self.multiply_adds and rows and len(scalars) > 1:
            # An unrolled loop loads its rows several times.
            width = rows * registers // self.multiply_adds
            if width and registers % width == 0 and registers > width and self.multiply_adds == len(scalars) * width:
                self.shape = (registers // width, width)
                # A value tile takes neighbours in memory, a score tile one feature of each key.
                size = 8 if instruction_set.endswith("_f64") else 4
                neighbours = list(range(min(scalars), min(scalars) + size * self.shape[0], size))
                self.kind = "value" if sorted(set(scalars)) == neighbours else "score"
        if not self.shape and self.multiply_adds >= 4 and any(re.match(r"v?pslld|shl\s+v", line) for line in body):
            self.kind = "exp"


def operands_x86(instruction_set, body):
    """Accumulators, one for each multiply-add; how many vectors of rows are loaded; displacements of the scalars that are loaded."""
    accumulators = [line.split()[-1] for line in body if re.match(X86_MULTIPLY_ADD[instruction_set], line)]
    rows = [line for line in body if re.match(r"v?mov[au]p[sd]\s+[^%]*\(.*\),", line)]
    rows += [line for line in body if re.match(r"v?(fn?m|mul)\w+\s+[^%]*\(", line) and "{1to" not in line]
    scalars = []
    for line in body:
        if operand := re.match(r"(?:vbroadcasts[sd]|movs[sd]|movddup)\s+(-?\d*)\(.*\),|v\w+\s+(-?\d*)\(.*\)\{1to", line):
            scalars.append(int(operand[1] or operand[2] or "0"))
    return accumulators, len(rows), scalars


def operands_neon(_, body):
    """As for x86. Either may be loaded by half of a pair; a scalar alone, into all lanes, or with its neighbours in one register, whose
    elements are then operands."""
    accumulators, rows, scalars = [], 0, []
    displacements, elements = {}, {}  # of the registers that were loaded last

    def forget(register):
        nonlocal rows
        if register in displacements:
            size, displacement = displacements.pop(register)
            used = elements.pop(register, set())
            if size == "q" and not used:
                rows += 1
            else:
                scalars.extend(displacement + 4 * element for element in sorted(used or {0}))

    for line in body:
        if multiply_add := re.match(r"fml[as]\s+v(\d+)\.4s, v\d+\.4s, v(\d+)\.4?s(?:\[(\d)\])?", line):
            accumulators.append(multiply_add[1])
            if multiply_add[3]:
                elements.setdefault(multiply_add[2], set()).add(int(multiply_add[3]))
        elif load := re.match(r"ld(?:p|r|ur|1r?)\s+\{?\s*([qdsv])(\d+)[^,]*(?:, [qds](\d+))?, \[\w+(?:, #(-?\w+))?", line):
            size, *registers, displacement = load.groups()
            for half, register in enumerate(filter(None, registers)):
                forget(register)
                displacements[register] = size, int(displacement or "0", 0) + half * {"q": 16, "d": 8, "s": 4, "v": 0}[size]
    for register in list(displacements):
        forget(register)
    return accumulators, rows, scalars


def functions(path):
    """(name, lines) of each function."""
    name, lines = None, []
    for line in path.read_text().splitlines():
        if line.strip() == ".cfi_startproc":
            lines = []
        elif line.strip() == ".cfi_endproc":
            yield name, lines
        else:
            if re.match(r"_?_(R|ZN)\S+:$", line):
                name = line.split(":")[0]
            lines.append(line.strip())


def innermost(lines):
    """(first, last) line of each loop that contains no other."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    jumps = {(labels[jump[1]], i) for i, line in enumerate(lines) if (jump := BRANCH.match(line)) and labels.get(jump[1], i) < i}
    return sorted(loop for loop in jumps if not any(loop != other and loop[0] <= other[0] and other[1] <= loop[1] for other in jumps))


def find_loops(paths):
    """Every innermost loop of the kernels in these files that multiplies and adds."""
    loops = []
    for path in map(Path, paths):
        for name, lines in functions(path):
            if not name or ("_R" in name[:3] and "PrefillBlock" not in name):
                continue
            has_frame_pointer = any(re.match(r"movq\s+%rsp, %rbp", line) for line in lines)
            for first, last in innermost(lines):
                body = [line for line in lines[first : last + 1] if re.match(r"[a-z]", line)]
                text = "\n".join(body)
                if "fmla" in text:
                    instruction_set = "neon"
                elif "vdpbf16ps" in text:
                    instruction_set = "avx512_bf16"
                elif "4pulp3x862v4" in name or "15instruction_set11avx512_bf16" in name:
                    instruction_set = "avx512"
                elif "15instruction_set4avx2" in name:
                    instruction_set = "avx2"
                elif "%xmm" in text:
                    instruction_set = "portable"
                else:
                    continue
                if instruction_set != "neon" and re.search(r"(fn?m(add|sub)\d+|\badd)pd\s", text):
                    instruction_set += "_f64"
                loop = Loop(instruction_set, body, has_frame_pointer)
                if loop.multiply_adds:
                    loops.append(loop)
    return loops
