"""How the package starts: the command's process, the environment, the extension module, the registration.

No other folder imports this one.
"""
