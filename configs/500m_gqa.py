"""The 500M model with grouped-query attention, 14 heads in 2 groups; the argument is `mixer,plan`.

The paper does not print its number of groups; 2 is ours. Paper, appendix B (mean accuracy in %,
WikiText word perplexity): standard 50.0, 38.6; uniform non_approximate 38.2, 5466.8, rnd_emb_qk
47.4, 84.6; plan even non_approximate 50.8, 38.1, rnd_emb_qk 50.4, 39.3.
Device hours, as computed: 31 of one H200 (1.54e+15 FLOPs a step, 28,610 steps, 40% MFU assumed).
Data: see README.md, "The paper's runs". Command:

    python -m deconstruct.train --config=configs/500m_gqa.py --workdir=runs/500m_gqa

For a TPU slice (compiles the step without one; training takes the same --config flags):

    python -m tools.aot --config=configs/500m_gqa.py --topology=v5e:4x4 \\
        --config.mesh.fsdp=16 --config.compute.micro_batches=1 --config.compute.remat=full
"""

from deconstruct import paper


def get_config(argument="standard,uniform"):
    config = paper.hybrid("500m", argument)
    config.model.num_kv_heads = 2
    return config
