"""The program: how it runs as `__main__`, its imports and exceptions, and whether it names devices.

Nothing here imports torch, and `tandem compare` runs files of this folder without the package.
"""
