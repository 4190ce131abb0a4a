"""What a generated script holds that its run cannot reach, by name and attribute."""
import ast
from collections import Counter
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CALLED = {"forward", "backward", "setup_context"}  # by torch
FROM_OUTSIDE = {"parameter folder of open_run"}  # golfnb.tools.checkpoint gives it


def loads(tree: ast.AST, imports: frozenset = frozenset()) -> Counter:
    "How often each name and attribute is read, attributes with a dot in front (not those of imports); getattr with a word reads it."
    found = Counter()
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in imports:
            continue
        if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Load):
            found[n.id if isinstance(n, ast.Name) else "." + n.attr] += 1
        elif isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("getattr", "hasattr") and isinstance(n.args[1], ast.Constant):
            found["." + n.args[1].value] += 1
    return found


def settings_of(tree: ast.AST) -> dict[str, tuple[str, ast.AnnAssign]]:
    "Name of each setting -> its class, its field."
    return {s.target.id: (c.name, s) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for s in c.body
            if isinstance(s, ast.AnnAssign) and isinstance(s.value, ast.Call) and ast.unparse(s.value.func) == "setting"}


def unread_parameters(tree: ast.AST, read: Counter) -> list[str]:
    "Parameters that their function does not read, or that every call leaves at its default, where the function is only called."
    calls, plain, found = {}, set(), []
    for n in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        calls.setdefault(getattr(n.func, "id", None) or "." + getattr(n.func, "attr", ""), []).append(n)
    methods = Counter(m.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, FUNCTIONS))
    owner = {m: c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, FUNCTIONS)}
    derived = {ast.unparse(b) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for b in c.bases}
    for fn in (n for n in ast.walk(tree) if isinstance(n, FUNCTIONS)):
        cls = owner.get(fn)
        key = cls.name if cls and fn.name == "__init__" else "." + fn.name if cls else fn.name
        mine = calls.get(key, [])
        free = any(ast.unparse(d).split("(")[0] not in ("staticmethod", "torch.no_grad", "contextmanager") for d in fn.decorator_list)
        stars = any(isinstance(a, ast.Starred) for c in mine for a in c.args) or any(not k.arg for c in mine for k in c.keywords)
        if free or stars or not mine or fn.name in CALLED or fn.name.startswith("__") and fn.name != "__init__" or cls and cls.name in derived:
            continue
        if cls and fn.name != "__init__" and (methods[fn.name] > 1 or hasattr_anywhere(fn.name)):
            continue
        if key[0] != "." and fn.name != "__init__" and read[key] != len(mine) or key[0] == "." and read[key] != len(mine):
            continue  # also handed on as a value
        static = any(ast.unparse(d) == "staticmethod" for d in fn.decorator_list)
        places = [a.arg for a in fn.args.args][bool(cls) and not static:]
        body = {n.id for s in fn.body for n in ast.walk(s) if isinstance(n, ast.Name)}
        for i, name in [*enumerate(places), *((10**6, a.arg) for a in fn.args.kwonlyargs)]:
            given = any(len(c.args) > i or any(k.arg == name for k in c.keywords) for c in mine)
            if name not in body or not given:
                found.append(f"parameter {name} of {key.lstrip('.')}")
    return found


def hasattr_anywhere(name: str) -> bool:
    "Whether text, lists, files or tensors have a method of that name."
    import torch

    return any(hasattr(kind, name) for kind in (str, bytes, list, dict, set, Path, torch.Tensor, torch.nn.Module, torch.cuda.Stream, torch.cuda.CUDAGraph))


def unreached(text: str) -> list[str]:
    "Functions, classes, constants, methods, parameters, fields and settings that nothing else of a script reads."
    tree = ast.parse(text)
    imports = frozenset((a.asname or a.name).split(".")[0] for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names)
    read, found = loads(tree, imports), []
    for n in tree.body:
        if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and read[n.name] <= loads(n)[n.name]:
            found.append(f"{'class' if isinstance(n, ast.ClassDef) else 'function'} {n.name}")
        targets = [t.id for t in getattr(n, "targets", ()) for t in ast.walk(t) if isinstance(t, ast.Name)] if isinstance(n, ast.Assign) else []
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            targets = [(a.asname or a.name).split(".")[0] for a in n.names]
        found += [f"name {t}" for t in targets if not read[t]]
    settings = settings_of(tree)
    whole = {a.id for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("fields", "settings_from", "model_from_settings") for a in n.args if isinstance(a, ast.Name)} - {"Config"}
    bases = {c.name: [ast.unparse(b) for b in c.bases] for c in ast.walk(tree) if isinstance(c, ast.ClassDef)}
    for name in list(whole):
        whole |= set(bases.get(name, ()))
    for c in (c for c in ast.walk(tree) if isinstance(c, ast.ClassDef)):
        for m in (m for m in c.body if isinstance(m, FUNCTIONS) and not m.name.startswith("__") and m.name not in CALLED):
            if read["." + m.name] <= loads(m, imports)["." + m.name]:
                found.append(f"method {c.name}.{m.name}")
    for name, (cls, s) in settings.items():
        if not read["." + name] and not any(k.arg == "fixed" for k in s.value.keywords) and cls not in whole:
            found.append(f"setting {name}")
    return [name for name in found + unread_parameters(tree, read) if name not in FROM_OUTSIDE]
