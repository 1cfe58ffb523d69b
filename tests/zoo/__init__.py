"""Tiny real pipelines of every flow pipeline class, with random weights, built from configs alone; no network.

`SPECIMENS` maps a name to its `Specimen`; the name is that of the class, with a variant in brackets where a class has two.
"""
