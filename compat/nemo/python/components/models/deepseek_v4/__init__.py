"""DeepSeek V4: batch, mask and gather entry points."""
