"""The report: Python's measurements, the types of the data, findings, and the text, page and trace."""
