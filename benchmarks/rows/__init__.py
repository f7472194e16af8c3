"""Rows: what `make bench` measures, one kind of row a file; each gives the results of its cases."""
