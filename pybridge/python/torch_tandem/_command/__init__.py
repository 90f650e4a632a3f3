"""The commands beside `tandem run`, and what their processes and those of a program are given."""
