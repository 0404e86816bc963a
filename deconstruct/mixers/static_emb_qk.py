"""`static_emb_qk`: queries and keys from the layer-0 embeddings, values from the input (eq. 13)."""

from deconstruct.mixers.standard import Standard


class StaticEmbQK(Standard):
    """Standard attention whose map depends on the tokens alone, not on the hidden state."""

    uses_embeddings = True

    def qk_source(self, h_BTD, ctx):
        return ctx.embeddings_BTD
