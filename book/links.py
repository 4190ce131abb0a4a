"""Sphinx extension: golfnb's names in prose, code and signatures lead to their definitions; terms to the glossary; chapter numbers to chapters."""
import ast
import html
import posixpath
import re
from functools import cache

from docutils import nodes
from names import Module, api_page, chapter_page, module_of, patched_class, place_of, places
from sources import PAGES, number, page_of, stems
from sphinx import addnodes

CHAPTERS = {s.split("_")[0]: page_of(s) for s in stems() if number(s) is not None}
CHAPTER_WORDS = re.compile(r"\b(?:[Cc]hapters?|[Ss]tud(?:y|ies))\s\d\d[a-z]?\b(?:(?:,|,?\s(?:and|to|or))\s\d\d[a-z]?\b)*")

PLAIN_NAMES = re.compile(r"(?<![\w./-])(?:[A-Z][a-z]+[A-Z]\w*|[A-Za-z]+_\w+)(?![\w/]|\.\w)")


@cache  # pages ask for the same places again and again
def relative(page: str, place: str) -> str:
    "A place of the site as seen from a page."
    target, _, anchor = place.partition("#")
    path = "" if target == f"{page}.html" and anchor else posixpath.relpath(target, posixpath.dirname(page) or ".")
    return path + (f"#{anchor}" if anchor else "")


def reference(page: str, place: str, *children: nodes.Node, style: str) -> nodes.reference:
    return nodes.reference("", "", *children, refuri=relative(page, place), internal=True, classes=[style])


# code

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def stores(node: ast.AST) -> list[ast.Name]:
    "The names that a statement binds, but for those inside a scope of its own."
    found = [node] if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else []
    return found + [n for c in ast.iter_child_nodes(node) if not isinstance(c, SCOPES) for n in stores(c)]


class Uses:
    "Positions in one cell of names that are golfnb's there: (line, column) -> (name as written, its place, the anchor of a definition)."

    def __init__(self, known: dict[str, str], module: Module | None, exported: bool):
        self.known, self.module, self.found = known, module, {}
        self.defined = module.names if module and exported else {}  # names whose definition may stand here

    def visit(self, node: ast.AST, hidden: frozenset[str] = frozenset()) -> "Uses":
        "Statements in order; in one, what is read is looked up before what it binds is bound."
        for child in ast.iter_child_nodes(node):
            later = [c for c in ast.iter_child_nodes(child) if isinstance(c, BLOCKS)] if isinstance(child, BLOCKS) else []
            if isinstance(child, SCOPES):
                self.scope(child, hidden)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                self.imports(child)
            elif later:  # if, for, with, try: the head, then the bodies
                head = ast.Module([ast.Expr(c) if isinstance(c, ast.expr) else c for c in ast.iter_child_nodes(child) if c not in later], [])
                self.visit(ast.Module(head.body + later, []), hidden)
            elif isinstance(child, ast.Name):
                self.name(child, hidden)
            else:
                self.visit(child, hidden)
                for n in stores(child) if isinstance(child, (ast.stmt, ast.withitem)) and not hidden else ():
                    self.bind(n.id, n.lineno, n.col_offset)
        return self

    def name(self, node: ast.Name, hidden: frozenset[str]):
        if isinstance(node.ctx, ast.Load) and node.id in self.known and node.id not in hidden:
            self.found[node.lineno, node.col_offset] = (node.id, self.known[node.id], "")

    def bind(self, name: str, line: int, column: int):
        "A name that a cell binds is defined here, or hides golfnb's from here on."
        if name in self.defined:
            public = self.defined[name].public
            self.found[line, column] = (name, api_page(self.module, name) if public else chapter_page(name, self.module), name)
            self.known[name] = chapter_page(name, self.module)
        else:
            self.known.pop(name, None)

    def imports(self, node: ast.Import | ast.ImportFrom):
        source = getattr(node, "module", None) or ""
        if source in places():
            self.found[node.lineno, node.col_offset + len("from ")] = (source, places()[source], "")
        for alias in node.names:
            place = places().get(f"{source}.{alias.name}")
            self.known.pop((alias.asname or alias.name).split(".")[0], None)
            if place:
                self.known[alias.asname or alias.name] = place
                self.found[alias.lineno, alias.col_offset] = (alias.name, place, "")

    def scope(self, node: ast.AST, hidden: frozenset[str]):
        "A function, class or comprehension: its own names hide golfnb's inside it."
        if isinstance(node, DEFINED):
            at = node.lineno, node.col_offset + len(type(node).__name__[:3].lower() + " ") + 2 * isinstance(node, ast.ClassDef)
            owner = patched_class(node)
            if owner and self.defined:
                name = f"{owner}.{node.name}"  # private classes have no entry in the API
                self.found[at] = (node.name, places().get(name) or chapter_page(name, self.module), name)
            elif not hidden:
                self.bind(node.name, *at)
        everything = list(ast.walk(node))
        shared = {n for s in everything if isinstance(s, (ast.Global, ast.Nonlocal)) for n in s.names}
        bound = {n.id for n in everything if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)} | {n.arg for n in everything if isinstance(n, ast.arg)}
        self.visit(node, hidden | (bound - shared) | {""})  # never empty inside: nothing there binds for the notebook


INDENT = re.compile(r"^((?:<[^>]*>)*)( *)")


def linked_code(markup: str, source: str, page: str, uses: Uses, anchored: set[str]) -> str:
    "Highlighted HTML of a cell with its golfnb names as links, a definition as an anchor too; each line is a box that knows its indentation, so that a long one folds under its own beginning."
    starts, at, out = [0], 0, []
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    lines = source.split("\n")
    table = {starts[line - 1] + len(lines[line - 1].encode()[:column].decode()): value for (line, column), value in uses.found.items()}
    for piece in re.split(r"(<[^>]*>)", markup):
        if piece and not piece.startswith("<"):
            text = html.unescape(piece)
            name, place, anchor = table.get(at, ("", "", ""))
            at += len(text)
            if name and text == name:
                new = f' id="{anchor}"' if anchor and anchor not in anchored else ""
                anchored.add(anchor)
                piece = f'<a class="golf-{"def" if anchor else "use"}"{new} href="{html.escape(relative(page, place))}">{piece}</a>'
        out.append(piece)
    rows = "".join(out).rstrip("\n").split("\n")
    return "".join(f'<span class="golf-line" style="--in:{len(INDENT.match(row)[2])}ch">{row}\n</span>' for row in rows)


def link_code(app, doctree, page: str) -> None:
    "Every Python cell of a page, in order, with one namespace for all of them; printed lines say how wide they are."
    module, anchored = module_of(page), set()
    known = {n: chapter_page(n, module) for n in module.names} if module else {}
    for block in list(doctree.findall(nodes.literal_block)):
        source, around = block.astext().rstrip("\n"), classes_around(block)
        if block.get("language") not in ("ipython3", "python", "ipython", "py"):
            block["classes"].append(f"golf-w{min(120, 10 * -(-max(map(len, source.split(chr(10)))) // 10))}")
            continue
        try:
            uses = Uses(known, module, "tag_exported" in around).visit(ast.parse(source))
        except SyntaxError:
            continue
        markup = app.builder.highlighter.highlight_block(source, "python", location=block)
        inner = re.search(r"<pre>(?:<span></span>)?(.*)</pre>", markup, re.S)
        linked = markup[:inner.start(1)] + linked_code(inner[1], source, page, uses, anchored) + markup[inner.end(1):]
        block.replace_self(nodes.raw("", f'<div class="highlight-python notranslate">{linked}</div>\n', format="html"))


def classes_around(node: nodes.Node) -> set[str]:
    found = set()
    while node is not None:
        found |= set(getattr(node, "attributes", {}).get("classes", ()))
        node = node.parent
    return found


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


def keep_words_whole(doctree) -> None:
    "In a table, code breaks between words and numbers: `A_B=0.97` may end a line behind its sign, not inside 0.97."
    for node in list(doctree.findall(nodes.literal)):
        if inside(node, nodes.entry) and len(parts := re.split(r"([A-Za-z]{1,12}|[\d.,]*\d)", node.astext())) > 3:
            kept = node.deepcopy()
            kept.children = []
            kept += [nodes.inline("", part, classes=["golf-word"]) if i % 2 else nodes.Text(part) for i, part in enumerate(parts) if part]
            node.replace_self(kept)


def free_signatures(app, doctree) -> None:
    "Types in signatures lead nowhere by themselves: Sphinx takes `bytes` for a field of that name."
    for node in [x for s in doctree.findall(addnodes.desc_signature) for x in s.findall(addnodes.pending_xref)]:
        node.replace_self(node.children)


def link_signatures(doctree, page: str) -> None:
    "Types in signatures: golfnb's lead to their chapters."
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


# sidebar

def entries(env, tree: addnodes.toctree) -> list[tuple[str, str, list]]:
    "Title, page and the entries below that page, of each entry of a table of contents."
    def below(page: str) -> list:
        return [entry for inner in env.tocs[page].findall(addnodes.toctree) for entry in entries(env, inner)]

    return [(title or env.titles[page].astext(), page, below(page)) for title, page in tree["entries"]]


def give_contents(app, env) -> None:
    "All pages are read: what the template of the sidebar shows, part by part."
    trees = env.tocs["index"].findall(addnodes.toctree)
    app.config.html_context["contents"] = [(tree.get("caption", ""), entries(env, tree)) for tree in trees]


def resolved(app, doctree, page: str) -> None:
    if app.builder.format != "html":
        return
    link_code(app, doctree, page)
    keep_words_whole(doctree)
    link_literals(doctree, page)
    link_signatures(doctree, page)
    link_prose(app, doctree, page)


def setup(app):
    app.connect("env-check-consistency", give_contents)
    app.connect("doctree-read", free_signatures)
    app.connect("doctree-resolved", resolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
