"""Switches a mechanism off: names of its modules are replaced for the duration of one run.

Problem: a switch in the product would be a flag that no user sets. A replaced name that another module has imported by
value, or that is never looked up, would give a run without a difference. Idea: a context manager here replaces
functions, properties and constants where they are looked up. A test checks that no other module holds a replaced name
by value. During a complete run, `watched` counts the calls of every replaceable name that do not return what the
replacement would: without one, the mechanism cannot change the run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_PACKAGE: Final = "plimsoll.core"


class Replacement(NamedTuple):
    """What a name becomes. says: in words. make: the replacement, given the original. source: of what it does.

    value: what the replacement returns for these arguments, where this is all that it does.
    """

    says: str
    make: Callable[[Any], Any]
    source: str = ""
    value: Callable[..., Any] | None = None


def constant(value: object) -> Replacement:
    """A constant with another value."""
    return Replacement(f"is {value!r}", lambda _: value)


def returning(value: object, says: str = "") -> Replacement:
    """A function, a method or a property with always the same value.

    None stands for a function that is called for its effects.
    """

    def constant_value(*_args: Any, **_kwargs: Any) -> object:
        return value

    return Replacement(
        says or f"returns {value!r}", lambda _: constant_value, value=None if value is None else constant_value
    )


def returning_argument(index: int, name: str) -> Replacement:
    """A function that returns one of its arguments as it is."""

    def argument(*args: Any, **kwargs: Any) -> Any:
        return args[index] if index < len(args) else kwargs[name]

    return Replacement(f"returns `{name}` as it is", lambda _: argument, value=argument)


def doing(function: Callable[..., Any]) -> Replacement:
    """A function that is given the original before its arguments; its docstring says what it does."""

    def make(original: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(original, *args, **kwargs)

    return Replacement(str(function.__doc__).rstrip("."), make, inspect.getsource(function))


class Switch(NamedTuple):
    """One replaced name. module: below plimsoll.core. name: of the module, or as "Class.attribute"."""

    module: str
    name: str
    replacement: Replacement

    @property
    def place(self) -> tuple[Any, str]:
        """The module or class that holds the name, and the attribute. Raises AttributeError where it does not."""
        owner: Any = importlib.import_module(f"{_PACKAGE}.{self.module}")
        *classes, attribute = self.name.split(".")
        for one in classes:
            owner = getattr(owner, one)
        if attribute not in vars(owner):
            raise AttributeError(f"{self.module} has no {self.name}")
        return owner, attribute

    @property
    def label(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.name}"


@dataclass(frozen=True)
class Mechanism:
    """One line of the table. does: one sentence. code: files below `core`, or `file:name`, that exist for it alone."""

    name: str
    does: str
    switches: tuple[Switch, ...]
    code: tuple[str, ...]

    @property
    def definition(self) -> tuple[Any, ...]:
        """What a run without it depends on."""
        return tuple((one.module, one.name, one.replacement.says, one.replacement.source) for one in self.switches)


def _replaced(original: Any, make: Callable[[Any], Any]) -> Any:
    return property(make(original.fget)) if isinstance(original, property) else make(original)


@contextmanager
def _replace(switch: Switch, make: Callable[[Any], Any]) -> Iterator[None]:
    owner, attribute = switch.place
    original = vars(owner)[attribute]
    setattr(owner, attribute, _replaced(original, make))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


@contextmanager
def switched_off(mechanism: Mechanism | None) -> Iterator[None]:
    """The law without the mechanism; all of it for None."""
    with ExitStack() as stack:
        for switch in mechanism.switches if mechanism is not None else ():
            stack.enter_context(_replace(switch, switch.replacement.make))
        yield


@contextmanager
def watched(mechanisms: Sequence[Mechanism]) -> Iterator[Counter[str]]:
    """The whole law; yields by the mechanism's name how often something that it replaces was called.

    Calls that returned what the replacement returns do not count. A constant counts as called once, because no call
    shows who reads it.
    """
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for mechanism in mechanisms:
            for switch in mechanism.switches:
                owner, attribute = switch.place
                original = vars(owner)[attribute]
                if not (callable(original) or isinstance(original, property)):
                    calls[mechanism.name] += 1
                    continue
                stack.enter_context(
                    _replace(switch, functools.partial(_counted, calls, mechanism.name, switch.replacement.value))
                )
        yield calls


def _counted(
    calls: Counter[str], name: str, value: Callable[..., Any] | None, original: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if value is None or not _equal(result, value(*args, **kwargs)):
            calls[name] += 1
        return result

    return call


def _equal(one: Any, other: Any) -> bool:
    """Whether both are the same. Arrays count as different, because their comparison is an array."""
    return one is other or (type(one) is type(other) and not hasattr(one, "__array__") and bool(one == other))
