"""The commands besides `tandem run`, and the setup of processes that a command or a program starts."""
