"""The parts of the device that are implemented in Python and installed when the device is registered.

The shim and the engine implement operators, memory and streams.
"""
