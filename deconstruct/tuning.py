"""What runs fastest where: the sizes and forms that a platform decides, and what decided them.

No result depends on them beyond rounding. What a kernel for one chip holds in that chip's memory is
its own affair (`kernels/*_tpu.py`, `*_gpu.py`); what of a model's activations is kept for the
backward is the config's (`compute.remat`), for it trades memory that only the user knows for time.
"Measured" is on 2 cores of a Xeon or of an EPYC with AVX-512, in float32; of accelerators only
their compilers were asked, and where nothing is said a value is carried over or reasoned.
"""

from typing import NamedTuple


class Tuning(NamedTuple):
    """Of a platform.

    Attributes:
      dtype: of the arithmetic where the config leaves it open.
      scan_layers: whether the layers are a scan where the config leaves it open.
      loss_chunk: tokens of a device whose logits exist at once in training.
      score_tokens, score_ids: logits that exist at once where nothing is differentiated: tokens of
        a device, and rows of the table.
      attention_rows: (length, rows of a block of scores up to it), ascending; None is any length.
      recurrence_chunk: positions of a chunk of Taylor attention's recurrence.
      recurrence_cost: time of a FLOP of that recurrence, in that of a FLOP of the scores.
      prefix_block: positions of a block of the prefix softmax.
      batch_tokens: that an evaluation reads at once, by each device; padding counts.
      compilation_flops: what an evaluation's arithmetic does while one more shape compiles.
    """

    dtype: str
    scan_layers: bool
    loss_chunk: int
    score_tokens: int
    score_ids: int
    attention_rows: tuple[tuple[int | None, int], ...]
    recurrence_chunk: int
    recurrence_cost: float
    prefix_block: int
    batch_tokens: int
    compilation_flops: float


CPU = Tuning(
    dtype="float32",
    # A loop over layers ran 1.3 times as fast as a scan (measured).
    scan_layers=False,
    # A chunk reads and writes the table's float32 gradient, 8 bytes a parameter, against its 6 * C
    # FLOPs a parameter: at 1,024 that is a tenth of the bandwidth of two cores. Chunks of 512 and
    # of 2,048 were no faster (measured).
    loss_chunk=1024,
    # They stay in a core's cache while their maximum and their sum are taken (measured).
    score_tokens=256,
    score_ids=2048,
    # Short blocks skip more of the upper half, long ones make larger products: forward and backward
    # the next size either way takes 6 to 16% longer at 256, 512 and 1,024 positions (measured).
    attention_rows=((256, 64), (1024, 128), (None, 256)),
    # In chunks of 128, 256, 512 and 1,024 positions 8,192 take 536, 565, 631 and 690 ms forward and
    # backward, 168, 164, 169 and 198 forward (measured); twice the chunks keep twice the states.
    recurrence_chunk=256,
    # With heads of 64 both forms take about as long at 6,200 positions; at 7,000 the recurrence
    # takes 0.91 of the time forward and 0.82 both ways (measured). FLOPs say 4,358.
    recurrence_cost=1.4,
    # Forward and backward blocks of 16 take 1.4 times as long, of 4 as long (measured).
    prefix_block=8,
    # Two cores compile a shape in about 1.7 s; half of that, for some processes score a list once
    # and others again and again.
    batch_tokens=2048,
    compilation_flops=2e11,
)

ACCELERATOR = Tuning(
    dtype="bfloat16",
    # A TPU's compiler took 33 s for a scan and 127 s for a loop over 24 layers of a 500M model.
    scan_layers=True,
    # As on a CPU, a third of a TPU v5e's bandwidth.
    loss_chunk=1024,
    # As much as fills it.
    score_tokens=1024,
    score_ids=1 << 16,
    attention_rows=CPU.attention_rows,
    # Products large enough for a matrix unit.
    recurrence_chunk=512,
    recurrence_cost=1.0,
    # On a TPU v5e, by its compiler's account of 4 x 2048 positions and 14 heads of 64, forward and
    # backward: 1.0 GB moved in blocks of 128, 1.6 of 64, 1.5 of 16.
    prefix_block=128,
    # A batch that fills it, and ten seconds.
    batch_tokens=16_384,
    compilation_flops=2e15,
)


def of(platform: str) -> Tuning:
    """The tuning of "cpu", "gpu" or "tpu"."""
    return CPU if platform == "cpu" else ACCELERATOR
