"""Sphinx's settings for the book; execution is off, and nothing is loaded from another host."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project, author, copyright = "golfnb", "the golfnb founders", "2026, the golfnb founders"
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx_copybutton", "links"]
copybutton_selector = "article pre:not(.cell_output pre)"  # code, and not what it prints
root_doc, language, smartquotes, highlight_language = "index", "en", False, "none"
nb_execution_mode, nb_merge_streams, nb_render_markdown_format = "off", True, "gfm"
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_enable_extensions, myst_heading_anchors = ["dollarmath", "colon_fence"], 3
myst_dmath_allow_labels, myst_dmath_double_inline = False, True
add_module_names, toc_object_entries_show_parents = False, "hide"
html_theme, html_title, html_favicon = "sphinx_book_theme", "golfnb", "static/favicon.svg"
templates_path = ["templates"]
html_css_files, html_js_files = ["golfnb.css"], ["golfnb.js"]
html_copy_source, html_show_sourcelink, html_show_search_summary = False, False, False  # a page opened from a file may not fetch others
html_theme_options = {"use_download_button": False, "use_fullscreen_button": False, "show_toc_level": 2, "home_page_in_toc": True, "show_navbar_depth": 1,
                      "pygments_light_style": "tango", "pygments_dark_style": "monokai", "extra_footer": "", "navbar_persistent": []}
mathjax_path = "mathjax/tex-chtml.js"
html_context = {"default_mode": "auto"}
