"""The documentation: pages, redrawn diagrams of the papers, and the API from docstrings."""
