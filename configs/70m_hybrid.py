"""The 70M model, standard attention in the layers that a plan names; the argument is `mixer,plan`.

Paper: sizes of table 9; no row of tables 1 to 4 has this size.
Device hours, as computed: 3.61 of one H200 (1.80e+14 FLOPs a step, 28,610 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/70m_hybrid.py --workdir=runs/70m_hybrid

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/70m_hybrid.py --topology=v5e:4x4
"""

from deconstruct import paper


def get_config(argument="non_approximate,even"):
    return paper.hybrid("70m", argument)
