"""Which definitions of the package are reached from what a user runs or imports.

Names at the top of a module are resolved through imports; attributes by their name alone, whatever object they are of.
So a method that shares its name with one that is called passes: what is found has no caller, but not all such is found.
"""

import ast
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGE = "resilient_jax"
OWN_BASES = frozenset(
    {"ABC", "Enum", "Exception", "Flag", "Generic", "IntEnum", "IntFlag", "NamedTuple", "Protocol"}
) | {*("OSError", "RuntimeError", "StrEnum", "Struct", "TypedDict", "ValueError")}
"""Bases of libraries that call no method of their subclasses by its name."""
REGISTERED = frozenset({"command", "callback", "register"})
"""Decorators that hand a function to a library: typer's, `atexit.register`."""
BY_NAME = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller"})

PROGRAM_IMPORT = re.compile(rf"from ({PACKAGE}[\w.]*) import (\w+)")

Name = tuple[str, str]
"""A module and a name at its top; the module "" stands for an attribute of any object."""


@dataclasses.dataclass(slots=True)
class Module:
    """What a module binds, and its statements that run when it is imported.

    Attributes:
        imported: of each imported name the module and the name there; "" for the module itself.
        defined: the definitions of each name.
        run: all other statements.
    """

    imported: dict[str, Name]
    defined: dict[str, list[ast.stmt]]
    run: list[ast.AST]


def read_module(name: str, tree: ast.Module, *, is_package: bool) -> Module:
    """Return what a module binds."""
    base = name.split(".") if is_package else name.split(".")[:-1]
    module = Module({}, {}, [])
    pending = list(tree.body)  # no import stands inside a function, by `test_layers`
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                module.defined.setdefault(node.name, []).append(node)
            case ast.Assign(targets=[ast.Name(id=key)]) | ast.AnnAssign(target=ast.Name(id=key)):
                module.defined.setdefault(key, []).append(node)
            case ast.ImportFrom():
                above = base[: len(base) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                module.imported |= {one.asname or one.name: (source, one.name) for one in node.names}
            case ast.Import():
                found = {one.asname or one.name.split(".")[0]: one for one in node.names}
                module.imported |= {key: (one.name if one.asname else key, "") for key, one in found.items()}
            case ast.If() | ast.Try():
                pending += [*node.body, *node.orelse]
                module.run += [node.test] if isinstance(node, ast.If) else []
            case _:
                module.run.append(node)
    return module


class Callers:
    """What is reached from the roots.

    Args:
        trees: of the package's files, by their path in it.
        instruments: rooms that are used where they are reached, and are themselves neither roots nor judged.
    """

    def __init__(self, trees: Mapping[str, ast.Module], instruments: Collection[str] = ()) -> None:
        self._instruments = instruments
        self._paths: dict[str, str] = {}
        self._modules: dict[str, Module] = {}
        for path, tree in trees.items():
            parts = [PACKAGE, *path.removesuffix(".py").split("/")]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self._paths[name] = path
            self._modules[name] = read_module(name, tree, is_package=is_package)
        self._reached: set[Name] = set()
        self._members: set[ast.AST] = set()
        self._waiting: dict[str, list[tuple[str, ast.AST]]] = {}
        self._pending: list[Name] = []
        for name, module in self._modules.items():
            if not self._is_instrument(name):
                self.reach(use for node in module.run for use in self._list_uses(name, node))
                self.reach((name, key) for key in module.defined if key.startswith("__"))
                self.reach((name, key) for key, nodes in module.defined.items() if _is_registered(nodes[0]))

    def reach_public(self, homes: Mapping[str, str]) -> None:
        """Reach public names with their modules, and all that is public of the classes among them."""
        for key, module in homes.items():
            self.reach([(module, key)])
            for node in self._modules[module].defined[key]:
                if isinstance(node, ast.ClassDef):
                    members = (child.name for child in node.body if isinstance(child, FUNCTION))
                    self.reach(("", member) for member in members if not member.startswith("_"))

    def reach_from_script(self, tree: ast.Module) -> None:
        """Reach what a script outside of the package imports, and all attributes that it names."""
        script = read_module("", tree, is_package=False)
        found = (self._resolve(*source) for source in script.imported.values())
        self.reach([one for one in found if one is not None and one[1]])
        self.reach(("", node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute))

    def reach(self, uses: Iterator[Name] | Collection[Name]) -> None:
        """Reach these names, and whatever their definitions use."""
        self._pending += uses
        while self._pending:
            module, name = found = self._pending.pop()
            if found in self._reached:
                continue
            self._reached.add(found)
            if not module:
                for home, member in self._waiting.pop(name, []):
                    self._reach_member(home, member)
                continue
            for node in self._modules[module].defined[name]:
                if isinstance(node, ast.ClassDef):
                    self._reach_class(module, node)
                else:
                    self._pending += self._list_uses(module, node)

    def list_unreached(self) -> Iterator[str]:
        """Yield the definitions that nothing reaches, as "path name" or "path Class.name"."""
        for name, module in self._modules.items():
            if self._is_instrument(name):
                continue
            for key, nodes in module.defined.items():
                if (name, key) not in self._reached:
                    yield f"{self._paths[name]} {key}"
                    continue
                classes = (node for node in nodes if isinstance(node, ast.ClassDef))
                members = (child for node in classes for child in node.body if isinstance(child, FUNCTION))
                yield from (
                    f"{self._paths[name]} {key}.{one.name}" for one in members if one not in self._members
                )

    def _is_instrument(self, module: str) -> bool:
        return any(f"{module}.".startswith(f"{PACKAGE}.{room}.") for room in self._instruments)

    def _reach_class(self, module: str, node: ast.ClassDef) -> None:
        is_called_by_library = self._has_library_base(module, node)
        for part in (*node.bases, *node.decorator_list, *node.keywords):
            self._pending += self._list_uses(module, part)
        for child in node.body:
            if not isinstance(child, FUNCTION):
                self._pending += self._list_uses(module, child)
            elif is_called_by_library or child.name.startswith("__") or ("", child.name) in self._reached:
                self._reach_member(module, child)
            else:
                self._waiting.setdefault(child.name, []).append((module, child))

    def _reach_member(self, module: str, member: ast.AST) -> None:
        self._members.add(member)
        self._pending += self._list_uses(module, member)

    def _has_library_base(self, module: str, node: ast.ClassDef) -> bool:
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = next((use for use in self._list_uses(module, base) if use[0]), None)
            if found is not None:
                nodes = self._modules[found[0]].defined[found[1]]
                if any(
                    isinstance(one, ast.ClassDef) and self._has_library_base(found[0], one) for one in nodes
                ):
                    return True
            elif (base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)) not in OWN_BASES:
                return True
        return False

    def _resolve(self, module: str, name: str) -> Name | None:
        """Return where a name is defined; the name "" with a module that it stands for; None: in a library."""
        if not name or module not in self._modules:
            return (module, "") if module in self._modules else None
        if f"{module}.{name}" in self._modules:
            return f"{module}.{name}", ""
        if name in self._modules[module].defined:
            return module, name
        source = self._modules[module].imported.get(name)
        return None if source is None else self._resolve(*source)

    def _list_uses(self, module: str, node: ast.AST) -> Iterator[Name]:
        for one in ast.walk(node):
            kind = type(one)  # a chain of cases takes most of the time of this test
            if kind is ast.Name or kind is ast.Attribute or kind is ast.Constant:
                yield from self._find_use(module, one)
            elif kind is ast.Call or kind is ast.MatchClass:
                yield from self._find_names(one)

    def _find_use(self, module: str, node: ast.AST) -> Iterator[Name]:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                found = self._resolve(module, name)
                if found is not None and found[1]:
                    yield found
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
                yield from self._find_attribute(module, value, attr)
            case ast.Constant(value=str(text)) if text.startswith(f"{PACKAGE}."):
                yield from self._find_text(text)
            case ast.Constant(value=str(text)) if f"from {PACKAGE}." in text:  # a program for another process
                found = (self._resolve(*source) for source in PROGRAM_IMPORT.findall(text))
                yield from (one for one in found if one is not None and one[1])
            case _:
                pass

    def _find_names(self, node: ast.AST) -> Iterator[Name]:
        match node:
            case ast.Call(func=ast.Name(id=call) | ast.Attribute(attr=call), args=args) if call in BY_NAME:
                texts = (arg.value for arg in args if isinstance(arg, ast.Constant))
                yield from (("", text) for text in texts if isinstance(text, str))
            case ast.MatchClass(kwd_attrs=names):
                yield from (("", name) for name in names)
            case _:
                pass

    def _find_attribute(self, module: str, value: ast.expr, attr: str) -> Iterator[Name]:
        parts = [attr]
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        found: Name | None = None
        if isinstance(value, ast.Name) and self._modules[module].imported.get(value.id) is not None:
            found = self._resolve(module, value.id)
            if found is None:
                if self._modules[module].imported[value.id][1]:
                    yield "", attr  # of an object of a library
                return
        while found is not None and not found[1] and parts:
            found = self._resolve(found[0], parts.pop())
        if found is not None and found[1]:
            yield found
        if found is None or parts or found[1]:
            yield "", attr

    def _find_text(self, text: str) -> Iterator[Name]:
        """Yield what a text names: a definition, `module:name`, or a module that is run or has a command."""
        module, _, name = text.replace(":", ".").rpartition(".")
        found = self._resolve(module, name) if module in self._modules else None
        if found is not None and found[1]:
            yield found
        elif found is not None:
            keys = {"main", found[0].rpartition(".")[2]} & self._modules[found[0]].defined.keys()
            yield from ((found[0], key) for key in keys)


def _is_registered(node: ast.stmt) -> bool:
    found = (one.func if isinstance(one, ast.Call) else one for one in getattr(node, "decorator_list", ()))
    return any(isinstance(one, ast.Attribute) and one.attr in REGISTERED for one in found)
