"""Fused operations of the optimised step. ``ops`` dispatches; Triton is imported only when a GPU tensor arrives."""
