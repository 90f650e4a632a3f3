"""The program: running it as `__main__`, its imports and exceptions, and whether it names devices.

No file of this folder imports torch, and `tandem compare` runs some of them without importing the package.
"""
