"""The features of `taylor_recurrence` in fast memory: made for a product, and their gradient.

Of y = x / K^(1/4) they are 1, which is left to the caller, y, and for each shift m from 0 to K/2
the K products of entries m apart, y_i y_(i + m mod K). Each pair appears once, but shift K/2 has
its pairs twice and shift 0 squares: those two bear sqrt(1/2). So all blocks of K features are the
product of y and K rows in a row of what lies ready, `parts`; and K (K/2 + 1) products stand for
K (K + 1) / 2 pairs, 1.5% more features at K = 64.

Axes: K key size (filled up with zeros to a multiple of 8), S positions of a chunk, F features of a
step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import tpu
from deconstruct.kernels.backends import platform

DEPTH = 256  # features of a step, at most: what a product sums over
HALF = 0.5**0.5
# Steps without a loop around them, at most, by the bytes of what products take: one's features are
# then made while another's products run. Of bfloat16 at K = 64 a step over 256 positions takes 38
# cycles and not 94 as a v5e's compiler schedules it (no TPU has run it); float32 gains less and
# compiles for long.
UNROLLED = {2: 17, 4: 4}
NUM_PARTS = 5


class Features(NamedTuple):
    """Those of one chunk of queries or keys.

    Attributes:
      key_size: of the array.
      chunk: S.
      dtype: of products.
    """

    key_size: int
    chunk: int
    dtype: jnp.dtype

    @property
    def rows(self) -> int:
        """K."""
        return tpu.fill_rows(self.key_size)

    @property
    def blocks(self) -> int:
        """Of K features: a shift's, or y itself, the last."""
        return self.rows // 2 + 2

    @property
    def blocks_a_step(self) -> int:
        most = max(DEPTH // self.rows, 1)
        return max(n for n in range(1, most + 1) if self.blocks % n == 0)

    @property
    def steps(self) -> int:
        return self.blocks // self.blocks_a_step

    @property
    def size(self) -> int:
        """F."""
        return self.blocks_a_step * self.rows

    @property
    def tile(self) -> int:
        return min(self.chunk, tpu.TILE)

    @property
    def parts(self) -> tuple[int, int, int]:
        """The shape of y twice, the same times sqrt(1/2), and ones. Tiles of positions lead: rows
        can be read from any one on only where a row is a tile wide.
        """
        return self.chunk // self.tile, NUM_PARTS * self.rows, self.tile

    def walk(self, step: Callable, init=None):
        """`step`(number, carry) -> carry, over the steps."""
        iterations = -(-self.steps // UNROLLED[self.dtype.itemsize])
        unroll = 1 if platform() == "cpu" else self.steps // iterations
        return jax.lax.fori_loop(0, self.steps, step, init, unroll=unroll)

    def lay(self, parts, x_KS) -> None:
        """Lays out what the features of x are made from."""
        y_KS = x_KS.astype(jnp.float32) * self.key_size**-0.25
        half_KS = HALF * y_KS
        for number, rows_KS in enumerate((y_KS, y_KS, half_KS, half_KS, jnp.ones_like(y_KS))):
            self._store(parts, self._part(number), rows_KS)

    def make(self, parts, n):
        """phi_FS of step n."""
        y_KS = self._load(parts, self._part(0))
        blocks = [y_KS * self._load(parts, at) for at in self._blocks(n)]
        return jnp.concatenate(blocks, axis=0).astype(self.dtype)

    def pull(self, parts, pulls, n, dphi_FS):
        """dy_KS through one factor of step n's features; `pulls`, the parts' gradient, gather what
        comes through the other.
        """
        y_KS = self._load(parts, self._part(0))
        dy_KS = jnp.zeros_like(y_KS)
        for i, at in enumerate(self._blocks(n)):
            dblock_KS = dphi_FS[i * self.rows : (i + 1) * self.rows]
            dy_KS += dblock_KS * self._load(parts, at)
            self._store(pulls, at, self._load(pulls, at) + dblock_KS * y_KS)
        return dy_KS

    def pulled(self, pulls, dy_KS):
        """dx_KS, of all steps' `dy_KS` and their `pulls`."""
        first, second, half, other_half = (self._load(pulls, self._part(i)) for i in range(4))
        dy_KS += first + second + HALF * (half + other_half)
        return dy_KS * self.key_size**-0.25

    def _part(self, number: int):
        return pl.ds(number * self.rows, self.rows)

    def _blocks(self, n):
        """The rows that y meets, for each block of step n."""
        for i in range(self.blocks_a_step):
            shift = n * self.blocks_a_step + i
            last = self.rows // 2
            squares_or_twice = (shift == 0) | (shift == last)
            start = jnp.where(squares_or_twice, 2 * self.rows + shift, shift)
            yield pl.ds(jnp.where(shift > last, 4 * self.rows, start), self.rows)

    def _load(self, parts, at):
        tiles = [parts[tile, at] for tile in range(self.parts[0])]
        return jnp.concatenate(tiles, axis=1)

    def _store(self, parts, at, rows_KS) -> None:
        for tile in range(self.parts[0]):
            parts[tile, at] = rows_KS[:, tile * self.tile : (tile + 1) * self.tile]
