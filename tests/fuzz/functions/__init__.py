"""Random programs of functions over state of all kinds: `python -m tests.fuzz.functions --programs 20000`.

Each program runs as plain Python and with its functions wrapped, and must show the same values both times. A
program is composed of independent pieces (`pieces.py`): where a value is stored, how code reaches the value,
what the value is used for, what changes it, which effects a call has, and which tensors share memory.
"""
