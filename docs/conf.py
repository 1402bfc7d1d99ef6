"""Configuration of the Sphinx build; `make docs` runs it."""

import re
import sys
from html import escape, unescape
from pathlib import Path

from docutils import nodes
from pygments.formatters import HtmlFormatter
from sphinx import addnodes
from sphinx.highlighting import PygmentsBridge
from sphinx.pycode import ModuleAnalyzer

from nnx_sharding._version import __version__

sys.path.insert(0, str(Path(__file__).parent))
import names

project = "nnx_sharding"
author = "The nnx_sharding authors"
project_copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = False  # the tables in api.md lead to the pages that are there
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of NamedTuples would otherwise be documented twice

# Every reference to a public name of ours must lead somewhere. Names of Python, JAX and Flax stay
# without a link: their inventories are only on the network, which a build must not need.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!nnx_sharding\b).*"),
    # Signatures name a re-exported class by its file.
    ("py:class", r"nnx_sharding\.(core|diagnostics|fitting|lifted|paths)\b.*"),
    ("py:class", r"nnx_sharding\.\w+\.\w+\..*"),
]

templates_path = ["_templates"]
html_theme = "sphinx_book_theme"
html_title = "nnx_sharding"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True


class Lines(HtmlFormatter):
    """Puts lines of code into boxes, so that site.css can break them; rows of tables stay whole."""

    def wrap(self, source):
        return super().wrap((is_line, self.box(part)) for is_line, part in source)

    @staticmethod
    def box(line):
        text = unescape(re.sub(r"<[^>]+>", "", line)).rstrip()
        indent = re.match(r"(>>> |\.\.\. )? *", text).end()
        if not text or re.search(r"\S {2,}[^#\s]|^-+[-. ]*$", text[indent:]):
            return line
        return f'<span class="line" style="--indent:{indent}ch">{line.rstrip()}</span>\n'


def add_description(app, pagename, templatename, context, doctree):
    """Gives search engines the first paragraph of a page."""
    paragraph = doctree and doctree.next_node(nodes.paragraph)
    if paragraph:
        text = escape(" ".join(paragraph.astext().split())[:200])
        context["metatags"] += f'<meta name="description" content="{text}" />\n'


def add_names(app, docname, source):
    """Has lists of names documented, and puts those of each page below its heading in the index."""

    def with_names(heading):
        page = Path(app.srcdir, heading[1]).read_text(encoding="utf-8")
        return f"{heading[0]}\n\n{names.index(page)}"

    source[0] = names.expanded(source[0])
    if docname == "api":
        headings = re.compile(r"^## \[.*\]\((reference/\w+.md)\)$", re.MULTILINE)
        source[0] = headings.sub(with_names, source[0])


def public_names(reference):
    """The full names by the last part, of those that cannot be a word or a name of JAX."""
    pages = (Path(reference, f"{page}.md") for page in ("shardings", "partition", "transforms"))
    ordered = [*pages, *sorted(Path(reference).glob("*.md"))]
    found = [name for page in ordered for name in names.documented(page.read_text("utf-8"))]
    by_word = {name.rpartition(".")[2]: name for name in reversed(found)}
    return {word: name for word, name in by_word.items() if not re.fullmatch("[a-z]+", word)}


def link_names(app, doctree):
    """Links the first mention of a public name on a page.

    In the sources it is plain code, which a repository shows as well.
    """
    targets = public_names(Path(app.srcdir, "reference"))
    for literal in list(doctree.findall(nodes.literal)):
        name = targets.pop(literal.astext().removesuffix("()"), None)
        if name and not isinstance(
            literal.parent, (nodes.reference, nodes.title, addnodes.pending_xref)
        ):
            options = {"refdomain": "py", "reftype": "obj", "reftarget": name}
            link = addnodes.pending_xref("", refdoc=app.env.docname, **options)
            literal.replace_self(link)
            link += literal


def setup(app):
    """Has functions shown by the signature with their defaults, not by those for type checkers."""
    analyze = ModuleAnalyzer.analyze

    def analyze_without_overloads(self):
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = analyze_without_overloads
    PygmentsBridge.html_formatter = Lines
    app.connect("html-page-context", add_description)
    app.connect("source-read", add_names)
    app.connect("doctree-read", link_names)
    return {"parallel_read_safe": True}
