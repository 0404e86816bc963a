"""The flags of the benchmarks that train."""

from absl import flags

from tools.bench.shapes import SHAPES

SHAPE = flags.DEFINE_multi_enum("shape", list(SHAPES), list(SHAPES), "which model and batch")
ROUNDS = flags.DEFINE_integer("rounds", 8, "turns of each side that count", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 3, "train steps a turn", lower_bound=1)
