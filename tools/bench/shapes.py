"""What both sides of `tools.bench train` run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of standard layers and its batch."""

    num_layers: int
    model_dim: int
    num_heads: int
    feed_forward_dim: int
    vocab_size: int
    batch_size: int
    length: int


SHAPES = {
    "small": Shape(4, 256, 4, 1024, 8192, 8, 256),
    "70m": Shape(6, 512, 8, 2048, 50_277, 4, 512),
}
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_NORM = 4e-4, 0.9, 0.9999, 1e-8, 0.1, 1.0
