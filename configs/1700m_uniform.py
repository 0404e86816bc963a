"""The 1.7B model, a Qwen3, with one mixer in every layer; the argument is the mixer.

Paper, 1.7B rows (mean accuracy in %, WikiText word perplexity): standard 54.2, 27.6; uniform
non_approximate 51.1, 67.3; rnd_emb_qk 51.0, 54.9.
Device hours, as computed: 353 of one H200 (5.87e+15 FLOPs a step, 85,830 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/1700m_uniform.py --workdir=runs/1700m_uniform

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/1700m_uniform.py --topology=v5p:2x2x4 \\
        --config.mesh.fsdp=16 --config.compute.micro_batches=4 --config.compute.remat=full
"""

from deconstruct import paper


def get_config(argument="standard"):
    return paper.uniform("1700m", argument)
