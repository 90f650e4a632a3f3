"""The report: what Python measures for it, its data's types, its findings, and text, page and trace of it."""
