"""The 160M model, standard attention in the layers that a plan names; the argument is `mixer,plan`.

Paper: sizes of table 9; no row of tables 1 to 4 has this size.
Device hours, as computed: 10.8 of one H200 (5.37e+14 FLOPs a step, 28,610 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/160m_hybrid.py --workdir=runs/160m_hybrid

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/160m_hybrid.py --topology=v5e:4x4
"""

from deconstruct import paper


def get_config(argument="non_approximate,even"):
    return paper.hybrid("160m", argument)
