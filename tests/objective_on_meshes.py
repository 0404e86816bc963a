"""Run by test_objective.py in a process with 8 CPU devices: meshes against one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_objective import RELATIVE_TO_PLAIN, ROWS, VOCAB, assert_near, make

from deconstruct import objective, sharding

jax.config.update("jax_numpy_rank_promotion", "raise")
x, table, targets, weights = make(8, 12)


def loss(x, table, targets, weights):
    return objective.weighted_loss(
        x, table, targets, weights, vocab_size=VOCAB, z_loss=1e-2, chunk_tokens=5
    )


def losses(x, table, targets, weights):
    tile = objective.Tile(5, 7)
    return objective.token_losses(x, table, targets, vocab_size=VOCAB, tile=tile)


def scores(x, table, targets, weights):
    """Every logit is twice in the table, so that the likeliest lies on two devices."""
    del weights
    half, tile = VOCAB // 2, objective.Tile(5, 7)
    table = table.at[half : 2 * half].set(table[:half])
    likeliest = jnp.argmax(x @ table[:VOCAB].T, axis=-1)
    return [
        objective.token_scores(x, table, ids, ids % 3 != 1, vocab_size=VOCAB, tile=tile)
        for ids in (targets, likeliest, likeliest + half)
    ]


gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)
wanted = [jax.jit(f)(x, table, targets, weights) for f in (loss, losses, gradients, scores)]
_, (_, first), (_, second) = wanted[3]
assert np.any(first) and not np.any(second)


def computations(text):
    """(those that a loop runs, at any depth; all), as texts of compiled HLO."""
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    inside = set(re.findall(r"body=%?([\w.-]+)", text))
    while True:
        called = set()
        for name in inside:
            called |= set(re.findall(r"(?:calls|to_apply|body)=%?([\w.-]+)", blocks[name]))
        if called <= inside:
            return [blocks[name] for name in inside], list(blocks.values())
        inside |= called


for sizes in [(8, 1, 1), (2, 2, 2)]:
    mesh = sharding.make_mesh(*sizes)
    rows = P(("data", "fsdp"))
    places = [NamedSharding(mesh, s) for s in (rows, P("tensor", "fsdp"), rows, rows)]
    inputs = [
        jax.device_put(a, s) for a, s in zip((x, table, targets, weights), places, strict=True)
    ]
    with jax.set_mesh(mesh):
        got = [jax.jit(f)(*inputs) for f in (loss, losses, gradients, scores)]
        where = (None, (places[0], places[1]))
        text = jax.jit(gradients, out_shardings=where).lower(*inputs).compile().as_text()
    jax.tree.map(lambda g, w: assert_near(g, w, RELATIVE_TO_PLAIN), got, wanted)
    assert not np.any(np.asarray(got[2][1][1])[VOCAB:])
    inside, everywhere = computations(text)
    assert inside, "no loop was compiled"
    table_sum = re.compile(rf"f32\[{ROWS // sizes[2]},\d+\][^\n]* (?:all-reduce|reduce-scatter)")
    assert not any(table_sum.search(block) for block in inside), sizes
    assert any(table_sum.search(block) for block in everywhere), sizes
print("equal")
