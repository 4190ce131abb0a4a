"""Sphinx extension: golfnb's names in prose, code and signatures lead to their definitions; terms to the glossary; chapter numbers to chapters."""
import ast
import html
import posixpath
import re
from functools import cache

from docutils import nodes
from names import Module, api_page, chapter_page, modules, place_of, places
from sources import PAGES, number, page_of, stems
from sphinx import addnodes
from sphinx.util.docutils import SphinxRole

CHAPTERS = {s.split("_")[0]: page_of(s) for s in stems() if number(s) is not None}
CHAPTER_WORDS = re.compile(r"\b(?:[Cc]hapters?|[Ss]tud(?:y|ies))\s\d\d[a-z]?\b(?:(?:,|,?\s(?:and|to|or))\s\d\d[a-z]?\b)*")

PLAIN_NAMES = re.compile(r"(?<![\w./-])(?:[A-Z][a-z]+[A-Z]\w*|[A-Za-z]+_\w+)(?![\w/]|\.\w)")


def relative(page: str, place: str) -> str:
    "A place of the site as seen from a page."
    target, _, anchor = place.partition("#")
    path = "" if target == f"{page}.html" and anchor else posixpath.relpath(target, posixpath.dirname(page) or ".")
    return path + (f"#{anchor}" if anchor else "")


def reference(page: str, place: str, *children: nodes.Node, style: str) -> nodes.reference:
    return nodes.reference("", "", *children, refuri=relative(page, place), internal=True, classes=[style])


# code

class Uses(ast.NodeVisitor):
    "Positions in one cell of names that are golfnb's there: (line, column) -> (name, its place, is this the definition?)."

    def __init__(self, known: dict[str, str], module: Module | None, exported: bool):
        self.known, self.module, self.found, self.scopes = known, module, {}, []
        self.defined = module.names if module and exported else ()  # names whose definition may stand here

    def mark(self, line: int, column: int, name: str, defines: bool = False):
        self.found[line, column] = (name, api_page(self.module, name) if defines else self.known.get(name) or places()[name], defines)

    def bind(self, name: str):
        "A name of the notebook itself hides golfnb's from here on."
        if not self.scopes and name not in self.defined:
            self.known.pop(name, None)

    def visit_ImportFrom(self, node):
        if (node.module or "") in places():
            self.mark(node.lineno, node.col_offset + len("from "), node.module)
        for alias in node.names:
            place = places().get(f"{node.module}.{alias.name}")
            if place:
                self.known[alias.name] = place
                self.mark(alias.lineno, alias.col_offset, alias.name)
            else:
                self.bind(alias.asname or alias.name)

    def visit_Import(self, node):
        for alias in node.names:
            self.bind((alias.asname or alias.name).split(".")[0])

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load):
            if node.id in self.known and not any(node.id in s for s in self.scopes):
                self.mark(node.lineno, node.col_offset, node.id)
        elif not self.scopes and node.id in self.defined:
            self.mark(node.lineno, node.col_offset, node.id, True)
        else:
            self.bind(node.id)

    def visit_Assign(self, node):
        for part in (node.value, *node.targets):  # what is assigned is read before the name is bound
            self.visit(part)

    def visit_For(self, node):
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def enter(self, node, bound: set[str]):
        self.scopes.append(bound)
        self.generic_visit(node)
        self.scopes.pop()

    def locals_of(self, node) -> set[str]:
        a = node.args
        bound = {p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]}
        shared = {n for s in ast.walk(node) if isinstance(s, (ast.Global, ast.Nonlocal)) for n in s.names}
        return (bound | {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}) - shared

    def visit_FunctionDef(self, node):
        self.define(node, "def ")
        for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(part)
        self.enter(node, self.locals_of(node))

    def visit_ClassDef(self, node):
        self.define(node, "class ")
        self.enter(node, {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)})

    def visit_Lambda(self, node):
        self.enter(node, self.locals_of(node))

    def comprehension(self, node):
        self.enter(node, {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)})

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension

    def define(self, node, word: str):
        if not self.scopes and node.name in self.defined:
            self.mark(node.lineno, node.col_offset + len(word), node.name, True)
        elif not self.scopes:
            self.bind(node.name)


def linked_code(markup: str, source: str, page: str, uses: Uses, anchored: set[str]) -> str:
    "Highlighted HTML of a cell with its golfnb names as links; a definition becomes an anchor and leads to the API."
    lines, at, table = source.split("\n"), 0, {}
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    for (line, column), value in uses.found.items():
        chars = len(lines[line - 1].encode()[:column].decode())
        table[starts[line - 1] + chars] = value
    out = []
    for piece in re.split(r"(<[^>]*>)", markup):
        if not piece or piece.startswith("<"):
            out.append(piece)
            continue
        text = html.unescape(piece)
        hit = table.get(at)
        at += len(text)
        if hit and text == hit[0]:
            name, place, defines = hit
            anchor = f' id="{name}"' if defines and name not in anchored else ""
            if defines:
                anchored.add(name)
            piece = f'<a class="golf-{"def" if defines else "use"}"{anchor} href="{html.escape(relative(page, place))}">{piece}</a>'
        out.append(piece)
    return "".join(out)


def link_code(app, doctree, page: str) -> None:
    "Every Python cell of a page, in order, with one namespace for all of them."
    module = next((m for m in modules().values() if m.chapter == page), None)
    known, anchored = {n: chapter_page(n, module) for n in module.names} if module else {}, set()
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") not in ("ipython3", "python", "ipython", "py"):
            continue
        cell, exported = block.parent, False
        while cell is not None and "cell" not in cell.get("classes", []):
            cell = cell.parent
        if cell is not None:
            exported = "tag_exported" in cell["classes"]
        source = block.astext().rstrip("\n")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        uses = Uses(known, module, exported)
        uses.visit(tree)
        markup = app.builder.highlighter.highlight_block(source, "python", location=block)
        inner = re.search(r"<pre>(?:<span></span>)?(.*)</pre>", markup, re.S)
        linked = markup[:inner.start(1)] + linked_code(inner[1], source, page, uses, anchored) + markup[inner.end(1):]
        block.replace_self(nodes.raw("", f'<div class="highlight-python notranslate">{linked}</div>\n', format="html"))


# prose

def inside(node: nodes.Node, *kinds: type) -> bool:
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False


def link_literals(doctree, page: str) -> None:
    for node in list(doctree.findall(nodes.literal)):
        place = place_of(node.astext(), page)
        if place and not inside(node, nodes.reference, nodes.title):
            node.replace_self(reference(page, place, node.deepcopy(), style="golf-use"))


def link_signatures(doctree, page: str) -> None:
    "Types in signatures: golfnb's lead to their chapters, and nothing else leads anywhere (Sphinx takes `bytes` for a field of that name)."
    for node in [r for s in doctree.findall(addnodes.desc_signature) for r in s.findall(nodes.reference)]:
        if "headerlink" not in node["classes"]:
            node.parent[node.parent.index(node):node.parent.index(node) + 1] = node.children
    for node in [t for s in doctree.findall(addnodes.desc_signature) for t in list(s.findall(nodes.Text))]:
        place, name = places().get(node.astext()), node.parent
        parameter = isinstance(name.parent, addnodes.desc_parameter) and name is name.parent[0]
        if place and not parameter and not inside(node, addnodes.desc_name, addnodes.desc_addname):
            name.replace(node, reference(page, place, nodes.Text(node.astext()), style="golf-use"))


def glossary_terms(app) -> dict[str, str]:
    objects = app.env.get_domain("std").objects
    return {name: f"{doc}.html#{label}" for (kind, name), (doc, label) in objects.items() if kind == "term"}


@cache
def synonyms() -> dict[str, tuple[str, ...]]:
    "Terms of the glossary that share one definition: lines that stand together."
    groups = re.findall(r"^((?:\S.*\n)+)(?=  \S)", (PAGES / "glossary.md").read_text(encoding="utf-8"), re.M)
    return {t: tuple(g.split("\n")[:-1]) for g in groups for t in g.split("\n")[:-1]}


QUIET = (nodes.reference, nodes.literal, nodes.title, nodes.math, nodes.raw, addnodes.desc_signature, nodes.literal_block, nodes.image, addnodes.toctree)


def split_text(node: nodes.Text, spans: list[tuple[int, int, nodes.Node]]) -> None:
    text, at, made = node.astext(), 0, []
    for begin, end, new in sorted(spans, key=lambda s: s[0]):
        if begin >= at:
            made += [nodes.Text(text[at:begin]), new]
            at = end
    made.append(nodes.Text(text[at:]))
    parent, index = node.parent, node.parent.index(node)
    parent[index:index + 1] = [n for n in made if not isinstance(n, nodes.Text) or n.astext()]


def link_prose(app, doctree, page: str) -> None:
    "Names written without backticks that can be nothing else, chapter numbers, and the first use of each term of the glossary."
    terms = glossary_terms(app) if page != "glossary" and not page.startswith("api/") else {}
    left = {t: re.compile(rf"(?<![\w-]){re.escape(t)}(?:s|es)?(?![\w-])", 0 if t[-1].isupper() else re.I) for t in sorted(terms, key=len, reverse=True)}
    for node in list(doctree.findall(nodes.Text)):
        if inside(node, *QUIET) or not inside(node, nodes.paragraph):
            continue
        text = node.astext()
        spans = [(m.start(), m.end(), reference(page, places()[m[0]], nodes.Text(m[0]), style="golf-use")) for m in PLAIN_NAMES.finditer(text) if m[0] in places()]
        for match in CHAPTER_WORDS.finditer(text):
            for n in re.finditer(r"\d\d[a-z]?\b", match[0]):
                target = CHAPTERS.get(n[0])
                if target and target != page:
                    begin = match.start() + n.start() if len(re.findall(r"\d\d", match[0])) > 1 else match.start()
                    spans.append((begin, match.start() + n.end(), reference(page, f"{target}.html", nodes.Text(text[begin:match.start() + n.end()]), style="golf-chapter")))
        for term, pattern in list(left.items()):
            match = pattern.search(text)
            if match and not any(b < match.end() and match.start() < e for b, e, _ in spans):
                spans.append((match.start(), match.end(), reference(page, terms[term], nodes.Text(match[0]), style="golf-term")))
                for same in synonyms().get(term, (term,)):
                    left.pop(same, None)
        if spans:
            split_text(node, spans)


# roles of the API pages

class FieldRole(SphinxRole):
    "The name of a field, with an anchor of its own."

    def run(self):
        name = self.text.rsplit(".", 1)[1]
        return [nodes.literal(name, name, ids=[self.text], classes=["golf-field"])], []


class ChapterRole(SphinxRole):
    "From an API entry to the chapter's cell that defines it."

    def run(self):
        module, name = self.text.split(".")
        chapter = modules()[module].chapter
        return [reference(self.env.docname, f"{chapter}.html#{name}", nodes.Text(f"Defined in chapter {chapter.split('_')[0]}"), style="golf-defined")], []


def resolved(app, doctree, page: str) -> None:
    if app.builder.format != "html":
        return
    link_code(app, doctree, page)
    link_literals(doctree, page)
    link_signatures(doctree, page)
    link_prose(app, doctree, page)


def setup(app):
    app.add_role("golf-field", FieldRole())
    app.add_role("golf-chapter", ChapterRole())
    app.connect("doctree-resolved", resolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
