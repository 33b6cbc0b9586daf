"""Gemma4: batch entry points."""
