"""The start of the package: the command's process, the environment, the extension module, the registration.

No other folder of the package imports this one.
"""
