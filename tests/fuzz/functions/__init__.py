"""Random programs of functions over state of all kinds: `python -m tests.fuzz.functions --programs 20000`.

Each program runs as plain Python and with its functions wrapped, and must show the same. A program is composed
of pieces (`pieces.py`) that know nothing of each other: where a value lives, how code gets to it, what it is used
for, what changes it, which effects a call has, and which tensors share memory.
"""
