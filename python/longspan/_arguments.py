"""Arguments that cannot be what a public function asks for, in one wording:

    <function>: `<argument>` is <what came>; expected <what>

The checks are plain enough for torch.compile to look through, and cost about what a
comparison costs."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_STRIDED = torch.strided


def said(value: Any) -> str:
    """What came, in words: "None", "an int", "a sparse float32 tensor"."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        kind = "nested " if value.is_nested else ""
        if value.layout is not torch.strided:
            kind = "sparse " if "sparse" in str(value.layout) else f"{value.layout} "
        return with_article(f"{kind}{str(value.dtype).removeprefix('torch.')} tensor")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def wrong(who: str, name: str, value: Any, expected: str) -> TypeError:
    return TypeError(f"{who}: `{name}` is {said(value)}; expected {expected}")


def is_dense(value: Any) -> bool:
    """Whether it is a tensor of plain numbers with strides."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is _STRIDED
        and not value.is_nested
        and not value.is_quantized
    )


def check_tensors(who: str, **named: Any) -> None:
    """That each is a tensor with strides, which is what kernels read."""
    for name, value in named.items():
        if not is_dense(value):
            raise wrong(who, name, value, "a dense tensor")


def check_optional_tensors(who: str, **named: Any) -> None:
    for name, value in named.items():
        if value is not None and not is_dense(value):
            raise wrong(who, name, value, "a dense tensor, or None")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number: an int, or what stands for one. True is none."""
    if isinstance(value, (int, torch.SymInt)):
        return not isinstance(value, bool)
    if isinstance(value, torch.Tensor):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_whole(
    who: str, name: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1
) -> None:
    if not is_whole(value):
        raise wrong(who, name, value, "a whole number")
    # While tracing, a number may be a symbol that nobody knows yet; operators look too.
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        return
    if value < least or value > most:
        if least == -(2**63):
            expected = "a number of 64 bits" if most == 2**63 - 1 else f"at most {most}"
        else:
            expected = f"{least} or more" if most == 2**63 - 1 else f"{least} to {most}"
        raise ValueError(f"{who}: `{name}` is {value}; expected {expected}")


def check_number(who: str, name: str, value: Any) -> None:
    """That it is a real number: an int, a float, or what stands for one."""
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        if not isinstance(value, bool):
            return
    elif is_number(value):
        return
    raise wrong(who, name, value, "a number")


def is_number(value: Any) -> bool:
    """Whether something that is neither an int nor a float stands for one."""
    if isinstance(value, (str, bytes, torch.Tensor)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


@contextmanager
def speaking_as(who: str, *others: str) -> Iterator[None]:
    """Refusals of functions that callers do not know by name begin with `who` instead."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for other in others:
            if type(error) is ValueError and text.startswith(f"{other}: "):
                raise ValueError(who + text[len(other) :]) from None
        raise


def check_finite(who: str, name: str, value: Any) -> float:
    """The number as a float; NaN and infinities are refused."""
    check_number(who, name, value)
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError):
        raise ValueError(f"{who}: `{name}` is {value}; expected a finite number") from None
    if not math.isfinite(number):
        raise ValueError(f"{who}: `{name}` is {value}; expected a finite number")
    return number


def check_flags(who: str, **named: Any) -> None:
    for name, value in named.items():
        if not isinstance(value, bool):
            raise wrong(who, name, value, "True or False")


def check_kind(
    who: str, name: str, value: Any, kinds: type | tuple[type, ...], expected: str
) -> None:
    if not isinstance(value, kinds):
        raise wrong(who, name, value, expected)


def check_callable(who: str, name: str, value: Any) -> None:
    if not callable(value):
        raise wrong(who, name, value, "a function")


def check_choice(who: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise wrong(who, name, value, f"one of {', '.join(choices)}")
    if value not in choices:
        raise ValueError(f"{who}: `{name}` is '{value}'; expected one of {', '.join(choices)}")


def as_text(text: str) -> str:
    """The same, where half characters, which C++ does not take, are written out."""
    return text.encode(errors="backslashreplace").decode()


def whole_numbers(who: str, name: str, values: Any) -> list[int]:
    """A list or tuple of whole numbers, as a list."""
    if isinstance(values, (str, bytes, Mapping, torch.Tensor)) or not isinstance(values, Sequence):
        raise wrong(who, name, values, "a list of whole numbers")
    for value in values:
        if not is_whole(value):
            raise TypeError(f"{who}: `{name}` holds {said(value)}; expected whole numbers")
        check_whole(who, name, value)
    return list(values)


# ---- Calls of C++ whose arguments do not fit.

_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number of 64 bits", lambda v: is_whole(v) and -(2**63) <= int(v) < 2**63),
    "float": ("a number", lambda v: isinstance(v, (int, float)) or is_number(v)),
    "bool": ("True or False", lambda v: isinstance(v, bool)),
    "str": ("a str", lambda v: isinstance(v, str)),
    "bytes": ("bytes", lambda v: isinstance(v, bytes)),
    "tuple": ("a tuple", lambda v: isinstance(v, tuple)),
    "Tensor": ("a tensor", lambda v: isinstance(v, torch.Tensor)),
    "object": ("anything", lambda v: True),
    "None": ("None", lambda v: v is None),
}


def mismatch(who: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The words for a call of `who` that pybind11 refused; `text` holds its signatures."""
    who = who.removesuffix(".__init__")
    signatures = re.findall(r"^\s+\d+\. (.*)$", text, re.MULTILINE)
    signatures = signatures or re.findall(r"^\w+(\(.*\) -> .*)$", text, re.MULTILINE)
    found = [_first_wrong(signature, args, kwargs) for signature in signatures]
    if len(found) == 1 and found[0] is not None:
        return f"{who}: {found[0]}"
    came = [said(value) for value in args if not _is_self(who, value)]
    came += [f"{name} = {said(value)}" for name, value in kwargs.items()]
    ways = " or ".join(f"({_readable(signature)})" for signature in signatures)
    return f"{who}: called with ({', '.join(came)}); expected {ways}"


def _first_wrong(signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The first argument that a signature of pybind11 does not take, in words."""
    by_order = [p for p in _parameters(signature) if p[0] not in ("*", "/")]
    names = [name for name, _, _ in by_order]
    if len(args) > len(by_order):
        takes = len([name for name in names if name != "self"])
        return f"{len(args) - ('self' in names)} arguments came; expected at most {takes}"
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            others = ", ".join(other for other in names if other != "self")
            return f"there is no argument `{name}`; expected {others}"
        given[name] = value
    for name, kind, optional in by_order:
        if name not in given:
            if not optional:
                return f"`{name}` is missing; expected {_expected(kind)}"
        elif not _fits(kind, given[name]):
            return f"`{name}` {_came(kind, given[name])}; expected {_expected(kind)}"
    # All are of the right kind, so one of them is too large for the int of C++.
    for name, kind, _ in by_order:
        number: Any = given.get(name)
        if "int" in _kinds(kind) and is_whole(number) and not -(2**31) <= int(number) < 2**31:
            return f"`{name}` is {number}; expected a whole number of 32 bits"
    return None


def _came(kind: str, value: Any) -> str:
    """What came for a kind, in words; of a list the entry that does not fit."""
    lists = [one for one in _kinds(kind) if "[" in one and not one.startswith("tuple")]
    if lists and isinstance(value, (list, tuple)):
        inside = _entries(lists[0])[0]
        entry = next((entry for entry in value if not _fits(inside, entry)), value)
        return f"holds {_number_or_kind(inside, entry)}"
    return f"is {_number_or_kind(kind, value)}"


def _number_or_kind(kind: str, value: Any) -> str:
    return str(value) if is_whole(value) and "int" in _kinds(kind) else said(value)


def _parameters(signature: str) -> list[tuple[str, str, bool]]:
    """(name, type, whether it has a default) of each."""
    inside = signature[signature.find("(") + 1 : signature.rfind(") ->")]
    found = []
    for part in filter(None, _split(inside, ",")):
        left, _, default = part.partition(" = ")
        name, _, kind = left.partition(": ")
        found.append((name, kind.strip(), bool(default)))
    return found


def _kinds(kind: str) -> list[str]:
    """The alternatives of a type, in Python's names for plain ones."""
    plain = re.sub(r"\b(?:[a-z_]\w*\.)*Supports(?:Int|Index)\b", "int", kind)
    plain = re.sub(r"\b(?:[a-z_]\w*\.)*SupportsFloat\b", "float", plain)
    plain = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", plain)  # modules of classes
    return list(dict.fromkeys(_split(plain.replace("int | int", "int"), " | ")))


def _split(text: str, mark: str) -> list[str]:
    """The parts between marks that lie outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and text.startswith(mark, at):
            parts.append(text[begin:at].strip())
            begin = at + len(mark)
    return [*parts, text[begin:].strip()]


def _entries(kind: str) -> list[str]:
    """The kinds inside of Sequence[..] or tuple[..]."""
    return _split(kind[kind.find("[") + 1 : -1], ",")


def _fits(kind: str, value: Any) -> bool:
    """Whether a value may be of a kind."""
    for one in _kinds(kind):
        if one in _PLAIN:
            if _PLAIN[one][1](value):
                return True
        elif "[" in one:
            inside = _entries(one)
            if not isinstance(value, (list, tuple)):
                continue
            if one.startswith("tuple") and len(inside) != len(value):
                continue
            kinds = inside if one.startswith("tuple") else inside[:1] * len(value)
            if all(map(_fits, kinds, value)):
                return True
        else:
            names = {base.__name__ for base in type(value).__mro__}
            if one in names or (one == "TokenRange" and _fits("tuple[int, int]", value)):
                return True
    return False


def _expected(kind: str) -> str:
    return ", or ".join(_words(one) for one in _kinds(kind))


def _words(one: str) -> str:
    if one in _PLAIN:
        return _PLAIN[one][0]
    if one.startswith("tuple["):
        return f"({', '.join(_words(part) for part in _entries(one))})"
    if "[" in one:
        return f"a list, each entry {_expected(_entries(one)[0])}"
    return with_article(one)


def _readable(signature: str) -> str:
    return ", ".join(
        f"{name}: {' | '.join(_kinds(kind))}" if kind else name
        for name, kind, _ in _parameters(signature)
        if name != "self"
    )


def _is_self(who: str, value: Any) -> bool:
    return who.partition(".")[0] in {base.__name__ for base in type(value).__mro__}
