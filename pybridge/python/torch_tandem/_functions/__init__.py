"""`torch_tandem.function`: calls that are replayed without Python once they have proven to be equal.

The arguments of a call become a key and tensors (`arguments`). While Python runs a call, it is recorded
(`recorder`): the code that runs is observed (`observe`), and the state that this code could read is listed
(`walk`, `state`). Recorded calls are compared, and equal ones become a graph (`learning`), which replays
later calls (`function`) and is audited (`audits`). docs/design/functions.md gives the reasons.
"""
