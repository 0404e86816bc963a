"""Checkpoints over Orbax: asynchronous, atomic, restorable on any mesh, refused when they differ.

A run's `checkpoints/` holds one numbered directory per stored step, with three items:

    weights     {"params": ..., "fixed": ...}, one leaf per array and layer
    optimizer   the optimizer's state
    metadata    JSON: step, data position, validation loss and the run's identity

Leaves are stored per layer (`layer_01/mixer/query/kernel`, ...) whatever the layout in memory:
a caller that stacks layers for a scan unstacks them before `save` and stacks again after `restore`.

A save writes under a temporary name and renames at its end, so a killed save leaves no step behind.
What can still be torn (a half-made copy, lost files) is found at restore: steps are tried newest
to oldest, and every refusal is logged. Reading never writes, moves or deletes anything.
"""

from deconstruct.checkpoint.identity import Identity, Metadata, differences
from deconstruct.checkpoint.integrity import files_sha256
from deconstruct.checkpoint.manager import Checkpointer, Restored
from deconstruct.checkpoint.reading import (
    FOLDER,
    StoredWeights,
    find_step,
    restore_weights,
    stored_steps,
)

__all__ = [
    "FOLDER",
    "Checkpointer",
    "Identity",
    "Metadata",
    "Restored",
    "StoredWeights",
    "differences",
    "files_sha256",
    "find_step",
    "restore_weights",
    "stored_steps",
]
