"""Figures as PNG files, and the report page, one self-contained HTML file."""
