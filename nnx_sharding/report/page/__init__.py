"""A report as one HTML page that needs nothing else."""

from .page import html_page as html_page
from .page import write_html

__all__ = ["write_html"]
