"""Pretrain decoder language models whose layers each name their own token mixer."""
