"""A report as one HTML page that needs nothing else."""

from .page import html_page, write_html

__all__ = ["html_page", "write_html"]
