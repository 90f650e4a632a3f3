"""Random PyTorch programs, run eagerly and by Tandem in each mode, and compared bit by bit.

`python -m tests.fuzz --programs 2000 --seed 0` runs 2,000 programs. A program whose results differ is shrunk
and printed.
"""
