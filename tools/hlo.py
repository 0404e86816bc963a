"""What a compiled program does, read off its optimised HLO text, loops multiplied out.

XLA's own cost analysis counts the body of a loop once, whatever its trip count, and has no sums by
kind of collective.
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
# Computations that run once for each run of the instruction; those of reductions have no products.
_CALLS = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch|called)_computations=\{([^}]*)\}"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

# A TPU's compiler writes a collective that goes on beside other work into each piece of that work;
# the piece that starts it has the flag -1.
_CONTINUES = re.compile(r'"async_collective_fusion_config":\{"flag_start":"\d')


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one device in one run of the program.

    Attributes:
      flops: of matrix products and convolutions, two for a multiply-add; what a custom call does
        inside is not seen, unless it is one of cuBLAS.
      collective_bytes: kind -> bytes of the larger of what goes in and what comes out.
      endless_loops: loops without a known trip count, which count as one turn.
    """

    flops: int
    collective_bytes: dict[str, int]
    endless_loops: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """`TYPE OPCODE(OPERANDS), ATTRIBUTES`; a constant has its value in place of operands."""

    name: str
    is_root: bool
    opcode: str
    result: str
    value: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.value)


_Computation = dict[str, _Instruction]


def costs(text: str) -> Costs:
    """Of a whole module, from its entry on.

    Args:
      text: `Compiled.as_text()`.
    """
    entry, computations = _parse(text)
    runs, endless = _runs(entry, computations)
    flops, moved = 0, collections.Counter()
    for name, number in runs.items():
        shapes = {i.name: i.result for i in computations[name].values()}
        for instruction in computations[name].values():
            flops += number * _flops(instruction, shapes)
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES and not _CONTINUES.search(instruction.attributes):
                moved[kind] += number * _moved(instruction, shapes)
    return Costs(flops, dict(sorted(moved.items())), endless)


def _parse(text: str) -> tuple[str, dict[str, _Computation]]:
    """(name of the entry, computation name -> its instructions, callees before their callers)."""
    entry, computations, current = None, {}, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif named := _NAMED.match(line := line.strip()):
            current[named[2]] = _instruction(named[2], bool(named[1]), line[named.end() :])
    assert entry is not None
    return entry, computations


def _instruction(name: str, is_root: bool, rest: str) -> _Instruction:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    close = _closing(rest, opcode.end() - 1)
    value = rest[opcode.end() : close - 1]
    return _Instruction(name, is_root, opcode[1], rest[:end], value, rest[close:])


def _closing(text: str, start: int = 0) -> int:
    """The place behind the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise AssertionError(f"brackets that do not close: {text}")


def _runs(entry: str, computations: dict[str, _Computation]) -> tuple[dict[str, int], int]:
    """How often each computation runs, and how many loops have no known trip count.

    Each branch of a conditional counts as if it were taken.
    """
    runs, endless = collections.Counter({entry: 1}), 0
    for name in reversed(computations):
        for instruction in computations[name].values():
            turns = 1
            if instruction.opcode == "while":
                found = _trip_count(instruction, computations[name], computations)
                turns, endless = found or 1, endless + (found is None)
            for callee in _callees(instruction):
                runs[callee] += runs[name] * turns
    return runs, endless


def _callees(instruction: _Instruction) -> Iterator[str]:
    if instruction.opcode in ("async-update", "async-done"):  # parts of what async-start began
        return
    for one, several in _CALLS.findall(instruction.attributes):
        yield from [one] if one else re.findall(r"%?([\w.\-]+)", several)


def _trip_count(loop: _Instruction, caller: _Computation, computations) -> int | None:
    """As XLA noted it, or read off `i = start; i < end; i += step`: on TPUs the note is dropped.

    None for a loop of another form.
    """
    if noted := _TRIP_COUNT.search(loop.attributes):
        return int(noted[1])
    condition, body = (
        computations[re.search(rf"{part}=%?([\w.\-]+)", loop.attributes)[1]]
        for part in ("condition", "body")
    )
    ends, starts = _root(condition), caller[loop.operands[0]]
    if ends.opcode != "compare" or "direction=LT" not in ends.attributes:
        return None
    left, right = (_origin(name, condition) for name in ends.operands)
    index = _tuple_index(left)
    if index is None or starts.opcode != "tuple" or _root(body).opcode != "tuple":
        return None
    start = _constant(_origin(starts.operands[index], caller))
    end, step = _constant(right), _step(index, body)
    return None if None in (start, end, step) else max(0, -(-(end - start) // step))


def _step(index: int, body: _Computation) -> int | None:
    """What a turn adds to element `index` of the loop's tuple."""
    new = _origin(_root(body).operands[index], body)
    if new.opcode != "add":
        return None
    before, added = (_origin(name, body) for name in new.operands)
    return _constant(added) if _tuple_index(before) == index else None


def _root(computation: _Computation) -> _Instruction:
    return next(i for i in computation.values() if i.is_root)


def _origin(name: str, computation: _Computation) -> _Instruction:
    """What `name` is a copy of."""
    while (instruction := computation[name]).opcode == "copy":
        (name,) = instruction.operands
    return instruction


def _tuple_index(instruction: _Instruction) -> int | None:
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(found[1]) if instruction.opcode == "get-tuple-element" and found else None


def _constant(instruction: _Instruction) -> int | None:
    return int(instruction.value) if instruction.opcode == "constant" else None


def _moved(instruction: _Instruction, shapes: dict[str, str]) -> int:
    given = [sizes for name in instruction.operands for sizes in _bytes(shapes[name])]
    results = _bytes(instruction.result)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        results = results[len(given) : 2 * len(given)]  # behind the operands, before contexts
    return max(sum(given), sum(results))


def _bytes(shape: str) -> list[int]:
    """Of each array of a shape, which may be a tuple."""
    return [math.prod(_sizes(sizes)) * _bits(dtype) // 8 for dtype, sizes in _SHAPE.findall(shape)]


def _bits(dtype: str) -> int:
    """Of f32, c64, f8e4m3fn: the first number of the name."""
    return _BITS[dtype] if dtype in _BITS else int(re.match(r"[a-z]+(\d+)", dtype)[1])


def _sizes(text: str) -> list[int]:
    return [int(size.removeprefix("<=")) for size in text.split(",") if size]


def _dims(shape: str) -> list[int]:
    return _sizes(_SHAPE.search(shape)[2])


def _flops(instruction: _Instruction, shapes: dict[str, str]) -> int:
    attributes = instruction.attributes
    if instruction.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
        axes = _sizes(summed[1]) if summed else []
    elif instruction.opcode == "custom-call" and 'custom_call_target="__cublas' in attributes:
        summed = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', attributes)
        axes = [int(axis) for axis in json.loads(summed[1])]
    elif instruction.opcode == "convolution":
        lhs, rhs = (_dims(shapes[name]) for name in instruction.operands)
        return 2 * _multiply_adds(attributes, lhs, rhs, _dims(instruction.result))
    else:
        return 0
    lhs = _dims(shapes[instruction.operands[0]])
    return 2 * math.prod(_dims(instruction.result)) * math.prod(lhs[axis] for axis in axes)


def _multiply_adds(attributes: str, lhs: list[int], rhs: list[int], out: list[int]) -> int:
    """Of a convolution, as which a TPU's compiler writes products; padding is no work."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes).groups()
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    spatial = sorted(c for c in labels[0] if c.isdigit())

    def size(of: int, label: str) -> int:
        return (lhs, rhs, out)[of][labels[of].index(label)]

    def per_axis(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * len(spatial)

    positions = [
        _valid_positions(size(0, axis), size(1, axis), size(2, axis), *numbers)
        for axis, *numbers in zip(
            spatial, per_axis("stride", "1"), per_axis("pad", "0_0"), per_axis("lhs_dilate", "1"),
            per_axis("rhs_dilate", "1"), strict=True,
        )
    ]  # fmt: skip
    batch = size(0, "b") // (int(groups[1]) if groups else 1)
    return size(1, "i") * size(1, "o") * batch * math.prod(positions)


def _valid_positions(lhs, kernel, out, stride, pad, lhs_dilate, rhs_dilate) -> int:
    """Pairs of (place in the kernel, place in the output) that read an element of the operand."""
    stride, step, apart = int(stride), int(lhs_dilate), int(rhs_dilate)
    low = int(pad.partition("_")[0])
    end = (lhs - 1) * step
    count = 0
    for place in range(kernel):
        offset = place * apart - low
        if step == 1:  # 0 <= i * stride + offset <= end
            first, last = max(0, -(offset // stride)), (end - offset) // stride
            count += max(0, min(out - 1, last) - first + 1)
        else:
            found = (i * stride + offset for i in range(out))
            count += sum(0 <= at <= end and at % step == 0 for at in found)
    return count
