"""The device in PyTorch, as far as Python makes it: what is installed when the device is registered.

Operators, memory and streams are the shim's and the engine's.
"""
