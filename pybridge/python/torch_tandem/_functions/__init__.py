"""`torch_tandem.function`: calls that are replayed without Python once they have proven to be equal.

The arguments of a call become a key and tensors (`arguments`). While Python runs a call, the code that runs
is observed (`observe`), and the state that this code could read is listed (`walk`, `state`). The class in
`function` compares recorded calls, replays graphs and audits them. docs/design/functions.md gives the
reasons.
"""
