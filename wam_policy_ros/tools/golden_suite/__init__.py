"""Comparisons of the engine with recorded runs of the published reference, one file per component."""
