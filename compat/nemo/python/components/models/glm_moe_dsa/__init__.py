"""GLM with sparse attention: batch and kernel entry points."""
