"""Run by test_aot.py in a process with 8 CPU devices: prints the costs of `program` as JSON."""

import dataclasses
import json

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from deconstruct import sharding
from tools import hlo


def program(w_LDD, x_BD):
    """All kinds of collectives, one of them and a product in each turn of a loop."""

    def turn(x_BD, w_DD):
        y_BD = x_BD @ w_DD
        return y_BD, jax.lax.psum(jnp.sum(y_BD, axis=0), "data")

    w_LDD = jax.lax.all_gather(w_LDD, "data", axis=1, tiled=True)
    x_BD, sums_LD = jax.lax.scan(turn, x_BD, w_LDD)
    x_BD = jax.lax.ppermute(x_BD, "data", [(i, (i + 1) % 8) for i in range(8)])
    scattered = jax.lax.psum_scatter(x_BD.T, "data", scatter_dimension=0, tiled=True)
    return sums_LD, scattered, jax.lax.all_to_all(x_BD, "data", 1, 0, tiled=True)


mesh = sharding.make_mesh(8)
mapped = jax.shard_map(
    program,
    mesh=mesh,
    in_specs=(P(None, "data"), P("data")),
    out_specs=(P(), P("data"), P("data")),
)
w_LDD = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)
x_BD = jax.ShapeDtypeStruct((32, 64), jnp.float32)
compiled = jax.jit(mapped).lower(w_LDD, x_BD).compile()
print(json.dumps(dataclasses.asdict(hlo.costs(compiled.as_text()))))
