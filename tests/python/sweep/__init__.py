"""Every causal family of the installed transformers, tiny and with random weights: right
over ranks, or refused by a message when it is parallelized."""
