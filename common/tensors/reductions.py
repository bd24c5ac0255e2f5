"""Reductions of distributed tensors along any dimensions."""
