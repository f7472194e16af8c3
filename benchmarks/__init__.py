"""Experiments of the paper, one a file, and the models they train."""
