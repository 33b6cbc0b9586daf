"""Drop-ins for other libraries: change the import line, keep the code."""
