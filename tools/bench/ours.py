"""The real train step, as a run compiles and calls it, for `tools.bench train` and `hybrids`."""

import time

import jax
import numpy as np

from deconstruct import flops, mixers, optim, sharding, step
from deconstruct import spec as spec_lib
from deconstruct.config import OptimizerConfig
from deconstruct.data.packing import Batch
from tools.bench import shapes


class Ours:
    """A compiled train step and its state on the first device.

    Attributes:
      parameters: how many.
      flops: of a step, by the formula.
      loss: of the last step.
    """

    def __init__(self, shape: shapes.Shape, mixer: str = spec_lib.STANDARD, plan: str = "uniform"):
        spec = make_spec(shape, mixer, plan)
        optimizer = OptimizerConfig(
            warmup_steps=0,
            schedule="constant",
            beta1=shapes.BETA1,
            beta2=shapes.BETA2,
            eps=shapes.EPS,
            weight_decay=shapes.WEIGHT_DECAY,
            clip_norm=shapes.CLIP_NORM,
        )
        schedule = optim.make_schedule(shapes.LEARNING_RATE, 1, optimizer)
        program = step.Program(
            spec=spec, optimizer=optim.make_optimizer(schedule, optimizer), schedule=schedule
        )
        mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
        self.parameters = flops.num_params(spec)
        self.flops = flops.train_flops(spec, shape.batch_size)
        self.loss: float | None = None
        batch = make_batch(shape)
        self._state = step.init_state(program, mesh, seed=0, text_ids=batch.tokens_BT[0])
        self._batch = sharding.place_batch(batch, mesh)
        abstract = step.abstract_batch(spec, shape.batch_size, mesh)
        self._step = step.compile_train_step(program, mesh, abstract)

    def steps(self, number: int) -> list[float]:
        """Milliseconds of each of so many train steps."""
        milliseconds = []
        for _ in range(number):
            start = time.perf_counter()
            self._state, metrics = self._step(self._state, self._batch)
            jax.block_until_ready((self._state, metrics))
            milliseconds.append((time.perf_counter() - start) * 1e3)
            self.loss = float(metrics["loss"])
        return milliseconds


def make_spec(
    shape: shapes.Shape, mixer: str = spec_lib.STANDARD, plan: str = "uniform"
) -> spec_lib.ModelSpec:
    """With standard layers alone it is the peer's Qwen2."""
    layers = spec_lib.plan_layers(shape.num_layers, mixer, plan)
    spec = spec_lib.ModelSpec(
        vocab_size=shape.vocab_size,
        max_len=shape.length,
        model_dim=shape.model_dim,
        feed_forward_dim=shape.feed_forward_dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        layers=layers,
    )
    return mixers.resolve(spec)


def make_batch(shape: shapes.Shape) -> Batch:
    """Random rows, the peer's own."""
    size = (shape.batch_size, shape.length + 1)
    ids = np.random.default_rng(0).integers(0, shape.vocab_size, size).astype(np.int32)
    ones = np.ones((shape.batch_size, shape.length), np.int32)
    positions = np.arange(shape.length, dtype=np.int32)[None, :] * ones
    return Batch(ids[:, :-1], ids[:, 1:], ones.astype(np.float32), positions, ones)
