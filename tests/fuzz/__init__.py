"""Random PyTorch programs, run eagerly and by Tandem in each mode, and compared bit by bit.

`python -m tests.fuzz --programs 2000 --seed 0` runs as many; what disagrees is shrunk and
printed as a program.
"""
