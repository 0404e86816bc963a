"""The 70M model with one mixer in every layer; the argument is the mixer.

Paper: sizes of table 9; no row of tables 1 to 4 has this size.
Device hours, as computed: 4.01 of one H200 (2.00e+14 FLOPs a step, 28,610 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/70m_uniform.py --workdir=runs/70m_uniform

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/70m_uniform.py --topology=v5e:4x4
"""

from deconstruct import paper


def get_config(argument="standard"):
    return paper.uniform("70m", argument)
