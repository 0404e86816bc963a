"""The flags that say which call of a kernel is compiled or timed."""

from absl import flags

from tools.kernel_calls import KernelCall, takes_documents

_ROWS = flags.DEFINE_integer("rows", 8, "rows of a batch", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "positions of a row", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "heads of queries", lower_bound=1)
_GROUPS = flags.DEFINE_integer(
    "groups", None, "heads of keys and values; as many without it", lower_bound=1
)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 64, "numbers of a head", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the arrays")
_DOCUMENT = flags.DEFINE_integer(
    "document",
    0,
    "length of documents that do not see each other; 0: rows are whole",
    lower_bound=0,
)
_MAKES_SCORES = flags.DEFINE_bool(
    "makes_scores",
    False,
    "prefix_softmax with its scores made of queries and keys, as its mixer does",
)
NAMES = [
    holder.name
    for holder in (
        _ROWS, _LENGTH, _HEADS, _GROUPS, _HEAD_SIZE, _DTYPE, _DOCUMENT, _MAKES_SCORES,
    )
]  # fmt: skip


def from_flags(op: str) -> KernelCall:
    """Raises:
    ValueError: documents for an op that knows none, or longer than rows; scores for one that
      makes them anyway; groups that do not divide the heads.
    """
    if _HEADS.value % (_GROUPS.value or 1):
        raise ValueError(
            f"--groups={_GROUPS.value} does not divide --heads={_HEADS.value}; give a divisor"
        )
    if _MAKES_SCORES.value and op != "prefix_softmax":
        raise ValueError(f"--makes_scores: {op} takes queries and keys anyway; leave it out")
    if _DOCUMENT.value and not takes_documents(op):
        raise ValueError(
            f"--document={_DOCUMENT.value}: {op} has the same map for all rows; name other ops"
        )
    if _DOCUMENT.value > _LENGTH.value:
        raise ValueError(
            f"--document={_DOCUMENT.value} is more than --length={_LENGTH.value}; 0 is whole rows"
        )
    return KernelCall(
        op,
        rows=_ROWS.value,
        length=_LENGTH.value,
        heads=_HEADS.value,
        groups=_GROUPS.value or _HEADS.value,
        head_size=_HEAD_SIZE.value,
        dtype=_DTYPE.value,
        document=_DOCUMENT.value,
        makes_scores=_MAKES_SCORES.value,
    )
