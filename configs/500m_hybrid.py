"""The 500M model, standard attention in the layers that a plan names; the argument is `mixer,plan`.

Paper, table 1, hybrid rows, plan even (mean accuracy in %, WikiText word perplexity): mlp 48.7,
45.8; approximate 51.6, 39.4; non_approximate 52.9, 39.4; rnd_emb_qk 49.8, 39.3; fixed_seq_qk 52.6,
38.5; static_emb_qk 51.8, 38.7; beside standard in all layers 51.9, 38.1.
Device hours, as computed: 30.3 of one H200 (1.51e+15 FLOPs a step, 28,610 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/500m_hybrid.py --workdir=runs/500m_hybrid

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/500m_hybrid.py --topology=v5e:4x4 \\
        --config.mesh.fsdp=16 --config.compute.micro_batches=1 --config.compute.remat=full
"""

from deconstruct import paper


def get_config(argument="non_approximate,even"):
    return paper.hybrid("500m", argument)
