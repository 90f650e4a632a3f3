"""`torch.compile` on Tandem: its replacement under `tandem run`, and the backend `tandem`."""
