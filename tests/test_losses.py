"""The first 8 losses of each mixer, as they were when they were last looked at.

A change that moves them is either a fault or a new result; DECONSTRUCT_WRITE_GOLDENS=1 writes the
file anew, and the review sees by how much.
"""

import json
import os
import pathlib

import jax
import pytest
from models import make_params
from test_step import make_batch, make_program, new_state

from deconstruct import step
from deconstruct.mixers import MIXERS

GOLDEN = pathlib.Path(__file__).parent / "goldens" / "losses.json"
# Between machines: Adam divides small gradients by their own size, which spreads their rounding.
TOLERANCE = 1e-4


def first_losses(mixer: str) -> list[float]:
    program = make_program(mixer)
    # Far from the initial values, at which all attention is nearly uniform and mixers are alike.
    state = new_state(program).replace(params=make_params(program.spec, std=0.3))
    batch = make_batch(program)
    train_step = jax.jit(lambda state, batch: step.train_step(program, state, batch))
    losses = []
    for _ in range(8):
        state, metrics = train_step(state, batch)
        losses.append(round(float(metrics["loss"]), 6))
    return losses


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_first_losses(mixer):
    losses = first_losses(mixer)
    assert losses[-1] < losses[0]
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("DECONSTRUCT_WRITE_GOLDENS") == "1":
        GOLDEN.write_text(json.dumps(known | {mixer: losses}, indent=1, sort_keys=True) + "\n")
        return
    assert mixer in known, (
        f"no losses of {mixer} are written down yet: run DECONSTRUCT_WRITE_GOLDENS=1 python -m "
        f"pytest tests/test_losses.py -k {mixer} and commit tests/goldens/losses.json"
    )
    assert losses == pytest.approx(known[mixer], rel=TOLERANCE)
