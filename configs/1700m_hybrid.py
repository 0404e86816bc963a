"""The 1.7B model, a Qwen3, standard in the layers that a plan names; the argument is `mixer,plan`.

Paper, 1.7B rows, plan even (mean accuracy in %, WikiText word perplexity): non_approximate 54.4,
29.9; rnd_emb_qk 55.0, 28.0; beside standard in all layers 54.2, 27.6.
Device hours, as computed: 331 of one H200 (5.50e+15 FLOPs a step, 85,830 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/1700m_hybrid.py --workdir=runs/1700m_hybrid

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/1700m_hybrid.py --topology=v5p:2x2x4 \\
        --config.mesh.fsdp=16 --config.compute.micro_batches=4 --config.compute.remat=full
"""

from deconstruct import paper


def get_config(argument="non_approximate,even"):
    return paper.hybrid("1700m", argument)
