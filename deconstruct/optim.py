"""The learning-rate schedule, and AdamW with clipping in one pass over memory.

A chain of `optax` transformations followed by a select between old and new state reads and copies
the moments several times: on a 2-core CPU it took 2.5 to 3 times as long as the form below (87
against 26 to 33 ms for 8.4M parameters, 500 against 200 to 226 ms for 76.7M, where three bare
read-and-write streams take 50 and 500), because the select makes XLA keep the old moments. So the
decision to skip a step acts on the scalars instead, and each leaf's moments are overwritten where
they lie. The state is `optax.ScaleByAdamState`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from deconstruct.config import OptimizerConfig

# Whether a parameter decays, by the last part of its name; its number of axes says nothing, for
# layers that are stacked for a scan give every leaf one more.
DECAYS = {"kernel": True, "table": True, "scale": False, "bias": False}


def make_schedule(
    learning_rate: float, num_steps: int, config: OptimizerConfig
) -> Callable[[Any], Any]:
    """Updates done so far -> learning rate of the next one.

    Linear from 0 over `warmup_steps`, then half a cosine from the peak down to `final_fraction` of
    it at `schedule_steps` (the paper's section 4.2), and flat from there; or the peak throughout
    with `schedule="constant"`.

    Args:
      learning_rate: the peak.
      num_steps: of the run; where the cosine ends unless the config says otherwise.
      config: the schedule's part of it.

    Raises:
      ValueError: a warm-up that leaves no steps to the cosine; values that the chosen schedule
        would not read.
    """
    end = num_steps if config.schedule_steps is None else config.schedule_steps
    _check("warmup_steps", config.warmup_steps, config.warmup_steps >= 0, "at least 0")
    if config.schedule == "constant":
        if config.schedule_steps is not None or config.final_fraction != 0:
            raise ValueError(
                "optimizer.schedule=constant has no end: leave optimizer.schedule_steps and "
                "optimizer.final_fraction at their defaults, or choose cosine"
            )
        after = optax.constant_schedule(learning_rate)
    elif config.schedule == "cosine":
        fraction = config.final_fraction
        _check("final_fraction", fraction, 0 <= fraction <= 1, "between 0 and 1")
        if end <= config.warmup_steps:
            raise ValueError(
                f"optimizer.warmup_steps={config.warmup_steps} leaves nothing of a schedule of "
                f"{end} steps; lower it, or raise num_steps"
            )
        after = optax.cosine_decay_schedule(learning_rate, end - config.warmup_steps, fraction)
    else:
        raise ValueError(f"optimizer.schedule={config.schedule!r} is neither cosine nor constant")
    warmup = optax.linear_schedule(0.0, learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(
    schedule: Callable[[Any], Any], config: OptimizerConfig
) -> optax.GradientTransformationExtraArgs:
    """AdamW with decoupled decay of kernels and tables, after clipping by the global norm.

    The update of `optax.chain(clip_by_global_norm, adamw)`, with two extra arguments:

        updates, state = optimizer.update(
            grads, state, params, grad_norm=norm, finite=norm_and_loss_are_finite)

    `grad_norm` spares computing `global_norm(grads)` twice. Where `finite` (a boolean scalar) is
    False, whatever the gradients hold, the updates are 0 and the state stays as it is, its count
    of updates included. Leaves keep their own shardings, for nothing but the norm leaves a leaf.

    Args:
      schedule: count of updates done -> learning rate.
      config: beta1, beta2, eps, weight_decay, clip_norm.

    Raises:
      ValueError: a value out of range; at the first use, a parameter whose name is not in `DECAYS`.
    """
    for name in ("beta1", "beta2"):
        value = getattr(config, name)
        _check(name, value, 0 <= value < 1, "at least 0 and below 1")
    _check("eps", config.eps, config.eps > 0, "positive")
    _check("weight_decay", config.weight_decay, config.weight_decay >= 0, "at least 0")
    clip = config.clip_norm
    _check("clip_norm", clip, clip is None or clip > 0, "positive, or None to not clip")

    def init(params):
        return optax.ScaleByAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(jnp.zeros_like, params),
            nu=jax.tree.map(jnp.zeros_like, params),
        )

    def update(grads, state, params, *, grad_norm=None, finite=None):
        if clip is not None:
            norm = global_norm(grads) if grad_norm is None else grad_norm
            scale = jnp.minimum(1.0, clip / norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        return _adamw(config, schedule, grads, state, params, finite)

    return optax.GradientTransformationExtraArgs(init, update)


def _adamw(config: OptimizerConfig, schedule, grads, state, params, finite):
    """The step itself. A skipped one decays no moment, adds none and has learning rate 0."""

    def unless_skipped(value, otherwise):
        return value if finite is None else jnp.where(finite, value, otherwise)

    def moment(decay, old, new):
        keep, add = unless_skipped(decay, 1.0), unless_skipped(1 - decay, 0.0)
        return jax.tree.map(lambda o, n: keep * o + add * unless_skipped(n, 0.0), old, new)

    mu = moment(config.beta1, state.mu, grads)
    nu = moment(config.beta2, state.nu, jax.tree.map(jnp.square, grads))
    count = state.count + 1
    mu_scale, nu_scale = (1 / _bias(beta, count) for beta in (config.beta1, config.beta2))
    rate = unless_skipped(schedule(state.count), 0.0)

    def change(p, m, v, decays):
        step = m * mu_scale / (jnp.sqrt(v * nu_scale) + config.eps)
        return -rate * (step + config.weight_decay * p if decays else step)

    updates = jax.tree.map(change, params, mu, nu, decay_mask(params))
    count = unless_skipped(count, state.count)
    return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)


def _bias(beta: float, count: jax.Array) -> jax.Array:
    """1 - beta^count, without the cancellation that costs 1e-4 of it at beta = 0.9999."""
    return -jnp.expm1(count * jnp.float32(math.log(beta))) if beta else jnp.float32(1)


def decay_mask(params):
    """The tree of `params` with True at the leaves that decay: kernels and tables.

    Raises:
      ValueError: a leaf whose name `DECAYS` does not list.
    """

    def decays(path, _):
        name = path[-1].key
        if name not in DECAYS:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} is named neither {', '.join(DECAYS)}; "
                "say in optim.DECAYS whether it decays"
            )
        return DECAYS[name]

    return jax.tree_util.tree_map_with_path(decays, params)


def global_norm(tree) -> jax.Array:
    """Square root of the sum of all squares, float32.

    As inner products: on CPU these run through the vector units, where a plain sum adds one number
    after the other, slower and, over millions, less exactly.
    """

    def squares(x):
        axes = tuple(range(x.ndim))
        x = x.astype(jnp.float32)
        return jax.lax.dot_general(x, x, ((axes, axes), ((), ())), precision="highest")

    return jnp.sqrt(sum(squares(leaf) for leaf in jax.tree.leaves(tree)))


def _check(name: str, value, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"optimizer.{name} must be {wanted}, not {value}")
