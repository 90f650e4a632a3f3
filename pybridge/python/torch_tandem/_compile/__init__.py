"""`torch.compile` on Tandem: what a program's call of it does, and the backend whose graphs are functions."""
